"""The costs of runs, by the steps that the site's page of costs records."""

import re

import pytest

from benchmarks import pods, training_cost

pytestmark = pytest.mark.fast
TABLE = """
| pod, remat, layers | attention | chips | PFLOP a step | hours | chip-hours | hours | chip-hours |
| --- | --- | --- | --- | --- | --- | --- | --- |
| v5e:16x16, none, scanned | simplex, orthogonal | 256 | 0.433 | 2, 1 | 572, 286 | 1.3 | 300 |
| v5e:16x16, none, scanned | exact | 256 | 0.431 | 2, 1 | 570, 285 | 1.1 | 200 |
| v6e:16x16, none, scanned | simplex, orthogonal | 256 | 0.433 | 2, 1 | 572, 286 | 1.3 | 1,00 |
| v6e:16x16, none, scanned | exact | 256 | 0.431 | 2, 1 | 1,570, 285 | 1.1 | 100 |
"""


def cells(table):
    return {row.split(" | ")[0].strip("| "): row.split(" | ") for row in table.splitlines()[2:]}


def test_chip_hours_are_those_of_the_steps():
    steps = training_cost.recorded_steps(TABLE)
    assert [step.estimated for step in steps] == [300, 200, 100, 100]
    assert [step.at_low for step in steps] == [572, 570, 572, 1570]
    pod = "v5e:16x16, none, scanned"
    ratio = training_cost.num_steps("places365") / training_cost.num_steps("imagenet2012")
    assert training_cost.chip_hours(steps, pod, "orthogonal", "places365") == pytest.approx(
        300 * ratio
    )
    assert training_cost.chip_hours(steps, pod, "exact", "imagenet2012") == 200
    assert training_cost.chip_hours(steps, pod, "exact", "imagenet2012", share=0.1) == 570
    assert training_cost.chip_hours(steps, pod, "exact", "imagenet2012", share=0.4) == 142.5


def test_an_attention_that_the_table_lacks_is_refused():
    steps, pod = training_cost.recorded_steps(TABLE), "v6e:16x16, none, scanned"
    with pytest.raises(ValueError, match="has no iid for v6e:16x16, none, scanned"):
        training_cost.chip_hours(steps, pod, "iid", "imagenet2012")


ONE = [("simplex", "imagenet2012")]


@pytest.mark.parametrize(("price", "first"), [(2.0, "v6e"), (4.0, "v5e")])
def test_the_cheapest_pod_is_first(price, first):
    steps = training_cost.recorded_steps(TABLE)
    table = training_cost.cost_table(steps, {"v5e": 1.0, "v6e": price}, ONE)
    assert table.splitlines()[2].startswith(f"| {first}:16x16")


def test_costs_at_shares_of_the_peak_stand_beside_the_estimate():
    """One run, and two of which the second costs 200 and 570 on ImageNet, and less elsewhere."""
    steps = training_cost.recorded_steps(TABLE)
    table = training_cost.cost_table(steps, {"v5e": 1.2}, ONE)
    header = table.splitlines()[0].split(" | ")
    assert [name.rpartition("hours ")[2] for name in header[2:4]] == [
        "at 10% of peak",
        "at 45% of peak",
    ]
    assert header[4:8:3] == [
        "chip-hours by XLA's estimate",
        "dollars by XLA's estimate",
    ]
    row = cells(table)["v5e:16x16, none, scanned"]
    assert row[1:8] == ["256", "572", "127", "300", "686", "153", "360"]
    assert row[8] == "1.2 to 2.2 |"
    less = training_cost.num_steps("places365") / training_cost.num_steps("imagenet2012")
    table = training_cost.cost_table(steps, {}, [*ONE, ("exact", "places365")])
    row = cells(table)["v5e:16x16, none, scanned"]
    assert row[2] == f"{572 + 570 * less:,.0f}"
    assert row[4] == f"{300 + 200 * less:,.0f}"
    assert len(row) == 6  # Without prices there are no dollars.


def test_a_pod_without_a_price_is_last():
    table = training_cost.cost_table(training_cost.recorded_steps(TABLE), {"v5e": 100.0}, ONE)
    assert table.splitlines()[-1].startswith("| v6e:16x16")
    assert cells(table)["v6e:16x16, none, scanned"][5:8] == ["-"] * 3


def test_a_text_without_the_table_is_refused():
    with pytest.raises(ValueError, match="must have the table of hours that pod_compile prints"):
        training_cost.recorded_steps("| a | b |")


def test_hours_to_prepare_follow_from_the_speeds():
    row = cells(training_cost.preparation_table(megabytes_per_second=10, images_per_second=100))
    # 154.6 GB at 10 MB/s, and 1,331,167 images at 100 a second.
    assert row["imagenet2012"][1:6] == ["1,331,167", "154.6", "4.3", "3.7", "309.3"]


def test_one_command_prints_all_of_it(capsys):
    training_cost.main(["--price", "v5e=1.5"])
    output = capsys.readouterr().out
    assert "All of Fig. 9, 36 runs:" in output
    listed = re.findall(r"^\| (v\d\w?:[^,]*)", output, re.MULTILINE)
    assert {name.partition(":")[0] for name in listed} == {*pods.CHIPS}
    assert (
        "Chip-hours by XLA's estimate on v5e:16x16, none, unrolled, of the fewest dollars" in output
    )
    assert all(source.name in output for source in training_cost.SOURCES)


@pytest.mark.parametrize("price", ["v5e", "v9=1", "v5e=-1", "v5e=0", "v5e=x"])
def test_prices_are_checked(price, capsys):
    with pytest.raises(SystemExit):
        training_cost.main(["--price", price])
    assert "must be CHIP=DOLLARS, the chip one of v3, v4, v5e, v6e" in capsys.readouterr().err

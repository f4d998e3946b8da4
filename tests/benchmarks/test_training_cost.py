"""The costs of runs, by the steps that the README of the ViT records."""

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
| v6e:16x16, none, scanned | exact | 256 | 0.431 | 2, 1 | 570, 285 | 1.1 | 100 |
"""


def cells(table):
    return {row.split(" | ")[0].strip("| "): row.split(" | ") for row in table.splitlines()[2:]}


def test_chip_hours_are_those_of_the_steps():
    steps = training_cost.recorded_steps(TABLE)
    assert [step.chip_hours for step in steps] == [300, 200, 100, 100]
    pod = "v5e:16x16, none, scanned"
    ratio = training_cost.num_steps("places365") / training_cost.num_steps("imagenet2012")
    assert training_cost.chip_hours(steps, pod, "orthogonal", "places365") == pytest.approx(
        300 * ratio
    )
    assert training_cost.chip_hours(steps, pod, "exact", "imagenet2012") == 200


def test_runs_are_those_in_kernels_where_the_table_has_them():
    attentions = "simplex in kernels, orthogonal in kernels"
    row = f"| v6e:16x16, none, scanned | {attentions} | 256 {'| 1 ' * 5}|"
    steps = training_cost.recorded_steps(TABLE + row)
    pod = "v6e:16x16, none, scanned"
    hours = [
        training_cost.chip_hours(steps, pod, attention, "imagenet2012")
        for attention in training_cost.ATTENTIONS
    ]
    assert hours == [1, 1, 100]
    with pytest.raises(ValueError, match="has no iid for v6e:16x16, none, scanned"):
        training_cost.chip_hours(steps, pod, "iid", "imagenet2012")


@pytest.mark.parametrize(("price", "first"), [(2.0, "v6e"), (4.0, "v5e")])
def test_the_cheapest_pod_is_first(price, first):
    steps = training_cost.recorded_steps(TABLE)
    table = training_cost.cost_table(steps, {"v5e": 1.0, "v6e": price})
    assert table.splitlines()[2].startswith(f"| {first}:16x16")
    row = cells(table)["v6e:16x16, none, scanned"]
    runs = sum(
        training_cost.num_steps(name) for name in training_cost.RUNS
    ) / training_cost.num_steps("imagenet2012")
    assert row[2:5] == ["100", f"{100 * price:,.0f}", f"{900 * runs:,.0f}"]
    assert row[5] == f"{900 * runs * price:,.0f}"


def test_a_pod_without_a_price_is_last():
    table = training_cost.cost_table(training_cost.recorded_steps(TABLE), {"v5e": 100.0})
    assert table.splitlines()[-1].startswith("| v6e:16x16")
    assert cells(table)["v6e:16x16, none, scanned"][3] == "-"


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
    listed = re.findall(r"^\| (v\d\w?:[^,]*)", output, re.MULTILINE)
    assert {name.partition(":")[0] for name in listed} == {*pods.CHIPS}
    assert "Chip-hours on v5e:16x16, none, unrolled, of the fewest dollars" in output
    assert all(source.name in output for source in training_cost.SOURCES)


@pytest.mark.parametrize("price", ["v5e", "v9=1", "v5e=-1", "v5e=0", "v5e=x"])
def test_prices_are_checked(price, capsys):
    with pytest.raises(SystemExit):
        training_cost.main(["--price", price])
    assert "must be CHIP=DOLLARS, the chip one of v3, v4, v5e, v6e" in capsys.readouterr().err

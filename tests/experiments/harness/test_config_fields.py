import ml_collections
import pytest

from experiments.harness import config_fields
from experiments.harness.mistakes import UserError

pytestmark = pytest.mark.fast
FIELDS = {"seed": int, "model.width": int}


def config(**changes):
    fields = ml_collections.ConfigDict({"seed": 0, "model": {"width": 4}})
    fields.update_from_flattened_dict(changes)
    return fields


def test_fields_are_returned_by_their_dotted_names():
    assert config_fields.check_fields(config(), FIELDS) == {"seed": 0, "model.width": 4}


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ({"seed": 0}, "lacks model.width"),
        ({"seed": 0, "model": {"width": 4, "x": 1}}, "field model.x; the known ones"),
        ({"seed": 0.0, "model": {"width": 4}}, "config.seed must be int, got 0.0"),
    ],
)
def test_fields_refuse(broken, match):
    with pytest.raises(UserError, match=match):
        config_fields.check_fields(ml_collections.ConfigDict(broken), FIELDS)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"a": 1}, "config.a must be at least 2, got 1"),
        ({"a": (3, 1)}, "Each of config.a must be at least 2, got 1"),
        ({"a": ()}, r"config.a must have at least one entry, got \(\)"),
        ({"a": (2.0,)}, "Each of config.a must be an integer, got 2.0"),
    ],
)
def test_least_refuses(values, match):
    config_fields.check_least({"a": (2, 3)}, {"a": 2})
    with pytest.raises(UserError, match=match):
        config_fields.check_least(values, {"a": 2})


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_refuses(seed):
    config_fields.check_range("seed", 2**32 - 1, config_fields.SEEDS)
    with pytest.raises(UserError, match=rf"config.seed must be from 0 to 2\^32 - 1, got {seed}"):
        config_fields.check_range("seed", seed, config_fields.SEEDS)


@pytest.mark.parametrize(
    ("seeds", "match"),
    [
        ((0,), r"config.seeds must be two or more, none twice, got \(0,\)"),
        ((1, 1), r"config.seeds must be two or more, none twice, got \(1, 1\)"),
        ((0, 2**32), r"config.seed must be from 0 to 2\^32 - 1"),
    ],
)
def test_seeds_refuse(seeds, match):
    config_fields.check_seeds((2**32 - 1, 0))
    with pytest.raises(UserError, match=match):
        config_fields.check_seeds(seeds)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ((), "config.a must have at least one entry"),
        (("x", 1.0), r"config.a must be numbers, got \('x', 1.0\)"),
        ((1, 1), r"config.a must ascend and have nothing twice, got \(1, 1\)"),
    ],
)
def test_ascending_refuses(value, match):
    with pytest.raises(UserError, match=match):
        config_fields.check_ascending({"a": value}, ["a"])


@pytest.mark.parametrize("value", [0.0, 3.5, 1, (1.0, float("inf")), (1.0, float("nan"))])
def test_distances_refuse(value):
    config_fields.check_distances({"a": (1.0, 3.0), "b": 2.0}, ["a", "b"], most=3.0)
    kind = "floats" if isinstance(value, tuple) else "a float"
    with pytest.raises(UserError, match=rf"config.a must be {kind} above 0 and at most 3, got"):
        config_fields.check_distances({"a": value}, ["a"], most=3.0)


@pytest.mark.parametrize(
    ("allowed", "value", "match"),
    [
        (config_fields.at_least(2), 1, r"^config\.a must be at least 2, got 1\.$"),
        (config_fields.at_least(0), float("nan"), r"^config\.a must be at least 0, got nan\.$"),
        (
            config_fields.at_least(1, also=-1),
            0,
            r"^config\.a, unless it is -1, must be at least 1, got 0\.$",
        ),
        (config_fields.above(0), 0.0, r"^config\.a must be above 0, got 0\.0\.$"),
        (config_fields.one_of(["x", "y"]), "z", r"^config\.a must be one of 'x', 'y', got 'z'\.$"),
    ],
)
def test_ranges_refuse(allowed, value, match):
    with pytest.raises(UserError, match=match):
        config_fields.check_range("a", value, allowed)


@pytest.mark.parametrize(
    ("allowed", "value", "text"),
    [
        (config_fields.at_least(2), 2, "at least 2"),
        (config_fields.at_least(1, also=-1), -1, "-1, or at least 1"),
        (config_fields.above(0), 1e-30, "above 0"),
        (config_fields.one_of(["x", "y"]), "y", "one of 'x', 'y'"),
    ],
)
def test_ranges_accept_their_values_and_say_what_these_are(allowed, value, text):
    config_fields.check_range("a", value, allowed)
    assert str(allowed) == text


@pytest.mark.parametrize(
    ("names", "question"),
    [
        (["sead"], " Did you mean seed?"),
        (["model.widht"], " Did you mean model.width?"),
        (["width"], " Did you mean model.width?"),
        (["sede", "optimizer.widthh"], " Did you mean seed and model.width?"),
        (["xyz"], ""),
    ],
)
def test_a_misspelt_field_gets_a_suggestion(names, question):
    fields = {"seed": int, "model.width": int}
    message = config_fields.unknown_field_message(names, fields)
    plural = "s" if len(names) > 1 else ""
    start = (
        f"Unknown config field{plural} {', '.join(names)}; the known ones are seed, model.width."
    )
    assert message == start + question

"""Checks of the fields of a config, by their dotted names."""

from __future__ import annotations

import difflib
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.harness.mistakes import UserError, user_mistakes
from simrf_jax._src import checks

# Type of each field of a config by its dotted name: {"model.width": int, ...}.
Fields = Mapping[str, type]


class Range(NamedTuple):
    """The values that a field may have.

    Attributes:
      text: The condition in words that follow "must be".
      contains: Returns whether a value meets the condition.
      also: One further value that is allowed, or None.
    """

    text: str
    contains: Callable[[Any], bool]
    also: int | None = None

    def __str__(self) -> str:
        """Returns the condition and the further value."""
        return self.text if self.also is None else f"{self.also}, or {self.text}"


def at_least(bound: float, *, also: int | None = None) -> Range:
    """Returns the range of numbers that are not below a bound."""
    return Range(f"at least {bound}", lambda number: number >= bound, also)


def above(bound: float) -> Range:
    """Returns the range of numbers above a bound."""
    return Range(f"above {bound}", lambda number: number > bound)


def one_of(names: Iterable[str]) -> Range:
    """Returns the range of some names."""
    known = tuple(names)
    return Range(f"one of {', '.join(map(repr, known))}", lambda name: name in known)


BELOW_ONE = Range("in [0, 1)", lambda x: 0 <= x < 1)
# jax.random.key gives every other seed the key of one of these.
SEEDS = Range("from 0 to 2^32 - 1", lambda seed: 0 <= seed < 2**32)


def check_range(name: str, value: Any, allowed: Range) -> None:
    """Refuses a value that is out of the range of its field.

    Args:
      name: Dotted name of the field.
      value: Value to check, of the type of the field.
      allowed: Range of the field.

    Raises:
      UserError: If the value is out of the range.

    Example:
      >>> check_range("mesh.data", 0, at_least(1, also=-1))
      Traceback (most recent call last):
        ...
      experiments.harness.mistakes.UserError: config.mesh.data, unless it is -1, must ...
    """
    if allowed.contains(value) or (allowed.also is not None and value == allowed.also):
        return
    unless = "" if allowed.also is None else f", unless it is {allowed.also},"
    raise UserError(f"config.{name}{unless} must be {allowed.text}, got {value!r}.")


def check_fields(
    config: ConfigDict, fields: Fields, least: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Refuses a config that has not these fields and no other, each of its type.

    Args:
      config: Config to check.
      fields: Types of its fields, by dotted name. One named ``seed`` or ``seeds`` must be in range.
      least: Smallest allowed numbers where they are not 1; see ``check_least``. None allows all.

    Returns:
      The values by dotted name.

    Raises:
      UserError: If it is no config, fields are missing or unknown, or one has the wrong type or is
        too small.
    """
    if not isinstance(config, ConfigDict):
        raise UserError(f"The config must be an ml_collections.ConfigDict, got {config!r}.")
    given = flatten(config)
    if unknown := sorted(given.keys() - fields.keys()):
        raise UserError(unknown_field_message(unknown, fields))
    if missing := [name for name in fields if name not in given]:
        raise UserError(f"The config lacks {', '.join(missing)}.")
    for name, value in given.items():
        if type(value) is not fields[name]:
            raise UserError(f"config.{name} must be {fields[name].__name__}, got {value!r}.")
    if least is not None:
        integers = [name for name, kind in fields.items() if kind is int and name != "seed"]
        seeds = {"seeds": 0} if "seeds" in fields else {}
        check_least(given, {**dict.fromkeys(integers, 1), **seeds, **least})
    if "seed" in given:
        check_range("seed", given["seed"], SEEDS)
    if "seeds" in given:
        check_seeds(given["seeds"])
    return given


def types_of(config: ConfigDict) -> dict[str, type]:
    """Returns the types of the fields of a config, with those of its groups at the end."""
    fields = sorted(flatten(config).items(), key=lambda field: "." in field[0])
    return {name: type(value) for name, value in fields}


def check_least(values: Mapping[str, Any], least: Mapping[str, int]) -> None:
    """Refuses integers, and entries of tuples of integers, below the least that makes sense.

    Args:
      values: Values of the fields, by dotted name.
      least: Smallest allowed numbers, by dotted name.

    Raises:
      UserError: If a number is too small, a tuple is empty, or an entry of it is not an integer.
    """
    for name, bound in least.items():
        value, what = values[name], f"config.{name}"
        if value == ():
            raise UserError(f"{what} must have at least one entry, got ().")
        if isinstance(value, tuple):
            what = f"Each of {what}"
        for number in value if isinstance(value, tuple) else (value,):
            with user_mistakes(TypeError, ValueError):
                checks.integer(what, number, least=bound)


def check_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Refuses what is not one of the known names.

    Raises:
      UserError: If it is another.
    """
    with user_mistakes(ValueError):
        checks.one_of(name, value, known)


def check_names(field: str, names: Sequence[object], known: Iterable[str]) -> None:
    """Refuses names in a field if there are none, or one is not known, by a ``UserError``."""
    known = tuple(known)
    if not names:
        raise UserError(f"config.{field} must name at least one of {', '.join(known)}, got ().")
    for name in names:
        check_one_of(f"Each of config.{field}", name, known)


def check_rows(field: str, num_features: int, exact_keys: int, per_row: int, method: str) -> None:
    """Refuses features that, without those that exact keys replace, are not whole rows of W."""
    rest = num_features - exact_keys
    if rest < 1 or rest % per_row:
        needed = "at least 1" if per_row == 1 else f"a positive multiple of {per_row}"
        less = f" less the {exact_keys} that exact keys replace" if exact_keys else ""
        raise UserError(f"config.{field}{less} must be {needed} for {method}, got {num_features}.")


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuses seeds that give no spread: fewer than two, one twice, or one that is no seed.

    Raises:
      UserError: If a seed is out of range, is there twice, or there are fewer than two.
    """
    for seed in seeds:
        check_range("seed", seed, SEEDS)
    if len(set(seeds)) != len(seeds) or len(seeds) < 2:
        raise UserError(f"config.seeds must be two or more, none twice, got {seeds}.")


def check_training(values: Mapping[str, Any], part: str = "") -> None:
    """Refuses fields of ``train_state.make_optimizer`` that cannot train.

    Args:
      values: Values of the fields, by dotted name. If they lack ``num_steps``, the warm-up may have
        any length.
      part: Prefix of the names of these fields, such as ``"digits."``.

    Raises:
      UserError: If a number is out of its range, or the warm-up does not end before the run.
    """
    ranges = {"learning_rate": above(0), "clip_norm": above(0), "weight_decay": at_least(0)}
    for name, allowed in (ranges | {"b2": BELOW_ONE}).items():
        check_range(part + name, values[part + name], allowed)
    warmup, steps = values[f"{part}warmup_steps"], values.get(f"{part}num_steps", math.inf)
    if warmup >= steps:
        raise UserError(f"config.{part}warmup_steps must be below num_steps={steps}, got {warmup}.")


def check_rotary(values: Mapping[str, Any], part: str = "") -> None:
    """Refuses heads whose dimensions are no pairs; see ``check_training``."""
    width, heads = values[f"{part}model.width"], values[f"{part}model.num_heads"]
    if width % (2 * heads):
        raise UserError(
            f"config.{part}model.width must be a multiple of 2 num_heads, got {width} and "
            f"num_heads={heads}."
        )


def check_distances(values: Mapping[str, Any], names: Iterable[str], *, most: float) -> None:
    """Refuses distances that are not floats above 0 and up to ``most``.

    At larger ones squared errors leave the range of their type, or their means have tails that no
    number of trials finds.
    """
    for name in names:
        value = values[name]
        for distance in value if isinstance(value, tuple) else (value,):
            if not isinstance(distance, float) or not 0 < distance <= most:
                kind = "floats" if isinstance(value, tuple) else "a float"
                raise UserError(
                    f"config.{name} must be {kind} above 0 and at most {most:g}, got {value}."
                )


def check_ascending(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses lists of numbers that are empty or do not ascend."""
    for name in names:
        value = values[name]
        if not value:
            raise UserError(f"config.{name} must have at least one entry, got ().")
        if not all(isinstance(number, (int, float)) for number in value):
            raise UserError(f"config.{name} must be numbers, got {value}.")
        if list(value) != sorted(set(value)):
            raise UserError(f"config.{name} must ascend and have nothing twice, got {value}.")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns ``{"model.width": 64, ...}``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Describes each difference between two flat configs."""

    def value(mapping: Mapping[str, Any], name: str) -> str:
        return repr(mapping[name]) if name in mapping else "absent"

    return [
        f"{name} is {value(theirs, name)} there, {value(ours, name)} here"
        for name in {**theirs, **ours}
        if name not in theirs or name not in ours or theirs[name] != ours[name]
    ]


def field_list(config: ConfigDict, fields: Fields, file: pathlib.Path) -> str:
    """Lists the fields of a config with their types and their values in its file.

    Example:
      >>> config = ConfigDict({"seed": 0, "model": {"width": 64}})
      >>> fields = {"seed": int, "model.width": int}
      >>> print(field_list(config, fields, pathlib.Path("paper.py")))
      Fields of the config, each set by --config.NAME=VALUE (type, value in paper.py):
        seed         int  0
        model.width  int  64
    """
    values = flatten(config)
    names = max(map(len, fields))
    types = max(len(kind.__name__) for kind in fields.values())
    lines = [
        f"  {name:{names}}  {kind.__name__:{types}}  {values.get(name)!r}"
        for name, kind in fields.items()
    ]
    title = f"Fields of the config, each set by --config.NAME=VALUE (type, value in {file.name}):"
    return "\n".join([title, *lines])


def unknown_field_message(names: list[str], fields: Fields) -> str:
    """Says which fields there are, and which of them may be meant.

    Example:
      >>> unknown_field_message(["widht"], {"seed": int, "model.width": int})
      'Unknown config field widht; the known ones are seed, model.width. Did you mean model.width?'
    """
    plural = "s" if len(names) > 1 else ""
    meant = [near for name in names if (near := _nearest_field(name, fields))]
    question = f" Did you mean {' and '.join(meant)}?" if meant else ""
    known = ", ".join(fields)
    return f"Unknown config field{plural} {', '.join(names)}; the known ones are {known}.{question}"


def _nearest_field(name: str, fields: Fields) -> str | None:
    """Returns the field whose name, or at least its last part, is spelt almost like this one."""
    if near := difflib.get_close_matches(name, fields, n=1):
        return near[0]
    by_last_part = {field.rpartition(".")[2]: field for field in fields}
    near = difflib.get_close_matches(name.rpartition(".")[2], by_last_part, n=1)
    return by_last_part[near[0]] if near else None

"""Checker of annotations that conftest.py installs while the tests run."""

import inspect
import re

import beartype

# As for mypy, an integer is a float, and a float is a complex number.
_CONFIG = beartype.BeartypeConf(violation_type=TypeError, is_pep484_tower=True)


def checked(function):
    """Returns a function of the same signature that raises unless its arguments fit.

    jaxtyping calls this twice for each function of the library, with two empty functions: one takes
    the arguments, before the call, and the other takes the arguments and the value returned, after
    the call. Only the second is checked. Arguments that contradict the annotations thus reach the
    library, which must refuse them in its own words; if it returns a value instead, the second
    check raises.
    """
    takes_the_value_returned = any(
        re.fullmatch(r"ret\d+", name) for name in inspect.signature(function).parameters
    )
    # JAX fills records with whatever a tree_map returns, by calling their constructors.
    if takes_the_value_returned and function.__name__ != "__init__":
        return beartype.beartype(conf=_CONFIG)(function)
    return function

"""Parameters of tests, most of them for the slow tests."""

from collections.abc import Mapping

import pytest


def slow_but(kept, cases):
    """Returns the parameters ``cases``, marked as slow but for those in ``kept``.

    Args:
      kept: Values or, if cases have names, names.
      cases: Values, or a mapping from names, which become the tests' ids, to values.
    """
    named = cases if isinstance(cases, Mapping) else {case: case for case in cases}
    assert set(kept) <= set(named), f"{set(kept) - set(named)} are no cases."
    return [
        pytest.param(
            value,
            id=name if isinstance(cases, Mapping) else None,
            marks=() if name in kept else pytest.mark.slow,
        )
        for name, value in named.items()
    ]

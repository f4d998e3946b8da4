"""The places that ``tests.mutants`` breaks are where it says."""

import pytest

from tests.mutants import MUTANTS, ROOT

pytestmark = pytest.mark.fast


def test_each_text_occurs_once_and_would_change():
    for mutant in MUTANTS:
        assert (ROOT / mutant.path).read_text().count(mutant.text) == 1, mutant
        assert mutant.text != mutant.wrong, mutant
        assert all((ROOT / name).exists() for name in mutant.tests.split()), mutant

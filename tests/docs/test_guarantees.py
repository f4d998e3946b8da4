"""CONTRIBUTING's table of guarantees: each names a test of the default suite, and its cases."""

import collections
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ROW = re.compile(r"^\| .*\| `(tests/\S+::\w+)` \| (\d+) \|$", re.MULTILINE)


def table():
    return {test: int(cases) for test, cases in ROW.findall((ROOT / "CONTRIBUTING.md").read_text())}


@pytest.mark.fast
def test_each_guarantee_names_a_test():
    assert len(table()) > 20
    for test in table():
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.slow
def test_each_guarantee_has_its_cases_in_the_default_suite():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *table()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = collections.Counter(line.split("[")[0] for line in run.stdout.splitlines())
    assert {test: found[test] for test in table()} == table()

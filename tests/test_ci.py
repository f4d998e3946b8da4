"""The commands of CI, which README and CONTRIBUTING quote, and the parts of its workflows."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = (ROOT / ".ci/run").read_text()
COMMANDS = re.findall(r"^ *(?:\S+=\S+ )?run '(.*)'$", SCRIPT, re.MULTILINE)
PARTS = re.findall(r"^(\w+)\(\) \{$", SCRIPT, re.MULTILINE)
# Those that a user or a contributor is told to run.
QUOTED = {
    "README.md": [command for command in COMMANDS if command.endswith("-m pytest")],
    "CONTRIBUTING.md": [
        command
        for command in COMMANDS
        if any(word in command for word in ("sphinx-build", ".venv-oldest", "dev.txt", "SIMRF_"))
    ],
}
pytestmark = pytest.mark.fast


@pytest.mark.parametrize("page", QUOTED)
def test_pages_quote_the_commands_of_ci(page):
    text = (ROOT / page).read_text()
    assert QUOTED[page]
    for command in QUOTED[page]:
        assert command in text


def test_workflows_run_every_part():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    [listed] = re.findall(r"part: \[(.*)\]", workflow)
    assert listed.split(", ") == [part for part in PARTS if part != "run"]


def test_every_slow_test_is_run_at_night():
    workflow = (ROOT / ".github/workflows/nightly.yml").read_text()
    [timing] = re.findall(r"^ *- run: (.* -m timing)$", workflow, re.MULTILINE)
    assert timing in (ROOT / "CONTRIBUTING.md").read_text()
    [listed] = re.findall(r"part: \[([\d, ]+)\]", workflow)
    [parts] = re.findall(r"--part \$\{\{ matrix\.part \}\}/(\d+)", workflow)
    assert listed.split(", ") == [str(part + 1) for part in range(int(parts))]

"""The commands of CI, which README and CONTRIBUTING quote, and its workflows."""

import pathlib
import re
import subprocess

import pytest

import simrf_jax

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


@pytest.mark.parametrize(("tag", "code"), [("v{}", 0), ("{}", 1), ("v{}0", 1), ("v0.0.0", 1)])
def test_a_release_needs_the_tag_of_its_version(tag, code):
    tag = tag.format(simrf_jax.__version__)
    run = subprocess.run([ROOT / ".ci/check_tag", tag], capture_output=True, text=True, check=False)
    assert run.returncode == code
    assert (f"The tag must be v{simrf_jax.__version__}, " in run.stderr) == (code == 1)


def test_a_release_checks_its_tag_before_it_builds():
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    commands = re.findall(r"^ *- run: (.*)$", workflow, re.MULTILINE)
    assert commands[0] == '.ci/check_tag "$GITHUB_REF_NAME"'
    assert commands.index("python -m build") < commands.index(
        "python -m twine check --strict dist/*"
    )


@pytest.mark.parametrize("name", ["ci", "nightly", "release"])
def test_actions_are_pinned_by_a_hash(name):
    actions = re.findall(r"uses: (.*)", (ROOT / f".github/workflows/{name}.yml").read_text())
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", action)

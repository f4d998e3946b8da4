"""Checks that the commands in the READMEs and on the site name what exists."""

import functools
import importlib
import importlib.util
import re
import shlex

import pytest

from tests.docs.pages import ROOT, TEXTS, fences, name

pytestmark = pytest.mark.fast
OURS = ("benchmarks", "colabs", "examples", "experiments")
# A command ends where the shell goes on with another one, a file or a comment.
COMMAND = re.compile(r"python3? -m ([\w.]+)((?:[^\n`&|>#\"']|\"[^\"\n]*\"|'[^'\n]*')*)")
FILE = re.compile(r"(?:-r|-c|--ignore=) ?((?:requirements|tests)/[\w/.]+)")


def commands(text):
    """Returns (module, arguments) of each command that runs one of the repository's modules."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = ((match[1], shlex.split(match[2])) for match in COMMAND.finditer(joined))
    return [(module, arguments) for module, arguments in found if module.split(".")[0] in OURS]


CASES = {
    f"{name(path)}: {module} {' '.join(arguments)}": (module, arguments)
    for path in TEXTS
    for module, arguments in commands(path.read_text())
}


@functools.cache
def source(module):
    """Returns the code of a module, and of the one that reads the flags of experiments."""
    shared = (ROOT / "experiments" / "harness" / "command_line.py").read_text()
    return importlib.util.find_spec(module).loader.get_source(module) + shared


@functools.cache
def config(module):
    """Returns the default config of an experiment."""
    package = ".".join(module.split(".")[:2])
    which = "digits" if package == "experiments.vit" else "paper"
    return importlib.import_module(f"{package}.configs.{which}").get_config()


def faults(module, arguments):
    """Yields what a command names and does not exist."""
    if importlib.util.find_spec(module) is None:
        yield f"module {module}"
        return
    if '__name__ == "__main__"' not in source(module):
        yield f"program {module}"
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if flag == "--config":
            path = value.partition(":")[0]
            if not path.isupper() and not (ROOT / path).is_file():
                yield f"config {path}"
        elif flag.startswith("--config."):
            fields, entry = flag.split(".")[1:], config(module)
            for field in fields:
                entry = entry.get(field) if hasattr(entry, "get") and field in entry else flag
            if entry is flag:
                yield f"field {flag}"
        elif flag.startswith("--") and not re.search(
            rf"[\"'](?:--)?{flag.removeprefix('--')}[\"']", source(module)
        ):
            yield f"flag {flag} of {module}"


@pytest.mark.parametrize("case", CASES)
def test_commands_name_what_exists(case):
    assert list(faults(*CASES[case])) == []


def test_there_are_commands_of_every_kind():
    modules = {module for module, _ in CASES.values()}
    assert len(modules) > 30
    assert {module.split(".")[0] for module in modules} == {*OURS}


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_files_in_commands_exist(path):
    text = "\n".join(code for _, code in fences(path.read_text(), "sh"))
    assert [file for file in FILE.findall(text) if not (ROOT / file).exists()] == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("python -m benchmarks.nothing", "module benchmarks.nothing"),
        ("python -m benchmarks.pods", "program benchmarks.pods"),
        ("python -m benchmarks.haar --gpu", "flag --gpu of benchmarks.haar"),
        ("python -m experiments.gram.main --config.nothing=1", "field --config.nothing"),
        ("python -m experiments.vit.main --config.model.nothing=1", "field --config.model.nothing"),
        ("python -m experiments.gram.main --config=nothing.py", "config nothing.py"),
        (
            "python -m experiments.gram.main \\\n  --wrokdir=a > b",
            "flag --wrokdir of experiments.gram.main",
        ),
    ],
)
def test_a_command_that_names_nothing_is_found(command, fault):
    [case] = commands(command)
    assert list(faults(*case)) == [fault]

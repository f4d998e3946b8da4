"""Checks that the notebooks run, and that the outputs stored in them belong to the present code."""

import base64
import json
import pathlib
import re

import nbformat
import pytest

from colabs import store
from experiments.harness import style
from tests import compilation

PATHS = store.paths()
NAMES = [path.stem for path in PATHS]
NUMBER = re.compile(r"[+-]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
# Accuracies of models that are trained anew, with other roundings.
TRAINED_TOLERANCE = 0.1


def read(path):
    return nbformat.read(path, as_version=4)


def texts(cell):
    """Returns what a cell prints."""
    return "".join(one.text for one in cell.outputs if one.output_type == "stream")


def pictures(notebook):
    """Returns the PNG files of a notebook."""
    return [
        base64.b64decode(output.data["image/png"])
        for cell in store.code_cells(notebook)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]


def difference(stored, printed, *, absolute=0.0):
    """Returns the first number that differs between two texts, with its name, or None.

    Numbers may differ by two per cent, by two units of the last place that the first text shows, or
    by ``absolute``. What stands between them must be the same.
    """
    if NUMBER.sub("#", stored).split() != NUMBER.sub("#", printed).split():
        return f"other words: {printed!r}"
    for one, two in zip(NUMBER.findall(stored), NUMBER.findall(printed), strict=True):
        digits = one.replace(",", "")
        mantissa, _, exponent = digits.partition("e")
        place = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        value, other = float(digits), float(two.replace(",", ""))
        if abs(value - other) > max(2.01 * place, 0.02 * abs(value), absolute):
            return f"{two} instead of {one}"
    return None


@pytest.mark.fast
def test_the_table_lists_the_notebooks():
    table = (store.FOLDER / "README.md").read_text()
    assert sorted(re.findall(r"\((\w+)\.ipynb\)", table)) == NAMES


@pytest.mark.fast
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_stored_outputs_are_of_the_present_code(path):
    notebook = read(path)
    message = f"Run `python -m colabs.store {path.stem}` and look at the figures."
    assert notebook.metadata.get("fingerprint") == store.fingerprint(notebook), message
    assert pictures(notebook)
    assert path.stat().st_size < 300 * 1024  # The limit of .pre-commit-config.yaml.
    for number, cell in enumerate(store.code_cells(notebook), 1):
        assert cell.execution_count == number
        assert "error" not in [output.output_type for output in cell.outputs]


@pytest.mark.fast
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_couplings_look_as_in_all_other_figures(path):
    [look] = [cell.source for cell in store.code_cells(read(path)) if "STYLES =" in cell.source]
    assert look == next(
        cell.source for cell in store.code_cells(read(PATHS[0])) if "STYLES =" in cell.source
    )
    colors = dict(re.findall(r'"(\w+)": {"color": "(#\w+)"', look))
    assert list(colors) == ["iid", "orthogonal", "simplex", "simplex_plus", "cross_polytope"]
    shared = colors.keys() & style.STYLES.keys()
    assert {name: colors[name] for name in shared} == {
        name: style.STYLES[name]["color"] for name in shared
    }


# Each takes up to two minutes of a core; CI runs them by themselves.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
@pytest.mark.filterwarnings("ignore")  # Jupyter itself warns.
def test_notebook_runs_and_prints_what_is_stored(path):
    # Two devices show that the training of train_vit.ipynb does not depend on their number.
    flags = f"{compilation.FLAGS} --xla_force_host_platform_device_count=2"
    env = {"XLA_FLAGS": flags if path.stem == "train_vit" else compilation.FLAGS}
    stored, new = read(path), store.run(path, env)
    assert len(pictures(new)) == len(pictures(stored))
    for before, after in zip(store.code_cells(stored), store.code_cells(new), strict=True):
        tags = before.metadata.get("tags", [])
        if "timed" not in tags:
            absolute = TRAINED_TOLERANCE if "trained" in tags else 0.0
            found = difference(texts(before), texts(after), absolute=absolute)
            assert found is None, f"{before.source}\n{found}"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("printed", "options", "found"),
    [
        ("m = 8: 0.500", {}, None),
        ("m  = 8:\n0.509", {}, None),
        ("m = 8: 0.511", {}, "0.511 instead of 0.500"),
        ("m = 8: 0.550", {"absolute": 0.1}, None),
        ("n = 8: 0.500", {}, "other words: 'n = 8: 0.500'"),
    ],
)
def test_difference_finds_other_numbers_and_words(printed, options, found):
    assert difference("m = 8: 0.500", printed, **options) == found


@pytest.mark.fast
def test_the_fingerprint_is_of_the_code_behind_the_first_cell(tmp_path):
    notebook = read(PATHS[0])
    before = store.fingerprint(notebook)
    store.code_cells(notebook)[0].source = "other = 1"
    notebook.cells[0].source = "Other text"
    assert store.fingerprint(notebook) == before
    store.code_cells(notebook)[1].source += "\nother = 1"
    assert store.fingerprint(notebook) != before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_keeps_text_and_pictures_alone_and_shows_its_progress(tmp_path, capsys):
    path = tmp_path / "small.ipynb"
    sources = (
        "import sys",
        "print('one'); print('two'); print('noise', file=sys.stderr)",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
    )
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    store.write(nbformat.v4.new_notebook(cells=cells), path)
    notebook = store.run(path, {})
    assert "small: 100%" in capsys.readouterr().err
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, 3]
    assert texts(notebook.cells[1]) == "one\ntwo\n"
    [picture] = notebook.cells[2].outputs
    assert [*picture.data] == ["image/png"]
    assert pictures(notebook)[0].startswith(b"\x89PNG")
    store.write(notebook, path)
    assert read(path).metadata.fingerprint == store.fingerprint(notebook)
    assert json.loads(pathlib.Path(path).read_text())["metadata"]["language_info"] == {
        "name": "python"
    }


@pytest.mark.fast
def test_store_refuses_names_of_no_notebook(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["store", "quickstart", "nothing"])
    with pytest.raises(SystemExit):
        store.main()
    assert "got nothing" in capsys.readouterr().err

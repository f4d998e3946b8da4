import pathlib

import nbclient
import nbformat
import pytest

COLABS = sorted((pathlib.Path(__file__).parent.parent / "colabs").glob("*.ipynb"))


def test_there_are_notebooks():
    assert "quickstart.ipynb" in [path.name for path in COLABS]


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", COLABS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # Jupyter itself warns.
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    images = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert images

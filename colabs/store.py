"""Runs notebooks and stores what they print and draw.

    python -m colabs.store               # All notebooks.
    python -m colabs.store quickstart    # One of them.

Run it after every change to the code of a notebook. A test compares the fingerprint that it stores
with the code, and the numbers that are stored with those of a new run.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
import pathlib
from collections.abc import Mapping

import nbclient
import nbformat
import tqdm
from PIL import Image

FOLDER = pathlib.Path(__file__).parent
_SECONDS = 600  # A cell that takes longer is a mistake.
_NO_DITHER = Image.Dither.NONE


def paths() -> list[pathlib.Path]:
    """Returns the paths of all notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Returns the cells that hold code. The first of them installs the library."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """Returns a hash of the code, except for the first cell, which depends on the address."""
    sources = [cell.source for cell in code_cells(notebook)[1:]]
    return hashlib.sha256("\n# %%\n".join(sources).encode()).hexdigest()


def run(path: pathlib.Path, env: Mapping[str, str]) -> nbformat.NotebookNode:
    """Returns a notebook after a run in a fresh kernel, with text and pictures alone as outputs.

    Args:
      path: The notebook, which runs in its own folder.
      env: Environment variables that are added to those of this process, or replace them.

    Raises:
      nbclient.exceptions.CellExecutionError: If a cell raises an error.
    """
    notebook = nbformat.read(path, as_version=4)
    # The kernel finds the library where this module is, installed or not.
    python_path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    num_cells = len(code_cells(notebook))
    with tqdm.tqdm(total=num_cells, desc=path.stem, unit="cell", dynamic_ncols=True) as bar:
        nbclient.NotebookClient(
            notebook,
            timeout=_SECONDS,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            on_cell_executed=lambda **_: bar.update(),
            resources={"metadata": {"path": str(path.parent)}},
        ).execute(env={**os.environ, "PYTHONPATH": python_path, **env})
    for number, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = number
        cell.outputs = [_tidy(output) for output in cell.outputs if _is_shown(output)]
    notebook.metadata = {
        "fingerprint": fingerprint(notebook),
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def _is_shown(output: nbformat.NotebookNode) -> bool:
    """Returns False for what programs write to the error stream, which depends on the machine."""
    return output.output_type != "stream" or output.name == "stdout"


def _tidy(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Returns an output with a picture of 256 colors, a third as large, and without its name."""
    if "image/png" in output.get("data", {}):
        picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"])))
        file = io.BytesIO()
        # This method keeps every color within a few steps of 256, also rare ones.
        small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=_NO_DITHER)
        small.save(file, "PNG")
        output.data = {"image/png": base64.b64encode(file.getvalue()).decode()}
    return output


def write(notebook: nbformat.NotebookNode, path: pathlib.Path) -> None:
    """Writes a notebook as Jupyter does, with a newline at the end."""
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n")


def main() -> None:
    """Runs the notebooks that the command line names and stores them."""
    known = {path.stem: path for path in paths()}
    parser = argparse.ArgumentParser(
        prog="python -m colabs.store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = parser.parse_args().names or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"expected names among {', '.join(known)}, got {', '.join(unknown)}")
    for name in names:
        write(run(known[name], {}), known[name])
        print(f"Stored {known[name].name}, {known[name].stat().st_size / 1024:.0f} KiB.")


if __name__ == "__main__":
    main()

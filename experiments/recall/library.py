"""Text of the sources of Python's standard library, split by file."""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig

from experiments.char_lm import corpus

# Hash of the text of Python 3.11.7, which the README's numbers are for.
SHA256 = "9dd4e6cd85801d867d40b756a86c39c358818f1fe5a8af95151c573dfb02f221"
# Packages of which most installations lack some files, and the text of experiments/char_lm.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
EVERY = 10  # One file of so many is for validation.


def load() -> corpus.Text:
    """Returns the modules of the standard library in alphabetical order, in printable ASCII.

    Modules whose name begins with an underscore depend on the platform, and are left out.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(folder) for path in folder.rglob("*.py")]
    kept = sorted(
        path for path in paths if not LEFT_OUT & {*path.parts} and not path.name.startswith("_")
    )
    pages = [printable((folder / path).read_text("utf-8", "ignore")) for path in kept]
    train = "".join(page for number, page in enumerate(pages) if number % EVERY)
    validation = "".join(pages[::EVERY])
    alphabet = "".join(sorted({*train, *validation}))
    return corpus.Text(
        corpus.encode(train, alphabet),
        corpus.encode(validation, alphabet),
        alphabet,
        hashlib.sha256((train + validation).encode()).hexdigest(),
    )


def printable(text: str) -> str:
    """Returns the printable ASCII characters of a text, and its line breaks."""
    return "".join(c for c in text if c == "\n" or " " <= c <= "~")

"""Small data set in a file such as those of the UCI repository."""

import hashlib

import numpy as np

from experiments.kernel_regression import uci


def add(monkeypatch, folder, name="car", num_rows=61):
    """Writes ``toy.data`` to a folder, puts it in the place of a data set, and returns its lines.

    A row has two numbers near the point of its class, a letter that tells two classes from the
    third, and a column to drop.
    """
    rng = np.random.default_rng(0)
    classes = rng.integers(3, size=num_rows)
    numbers = rng.normal(size=(num_rows, 2)) * 0.5 + np.array([[0, 0], [2, 0], [0, 2]])[classes]
    lines = [
        f"{a:.4f},id{i},{'xxy'[c]},{b:.4f},class{c}"
        for i, ((a, b), c) in enumerate(zip(numbers, classes, strict=True))
    ]
    path = folder / "toy.data"
    path.write_text("\n".join(lines) + "\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    source = uci.Source("toy/toy.data", digest, 0.5, categorical=(2,), dropped=(1,))
    monkeypatch.setitem(uci.SOURCES, name, source)
    return lines

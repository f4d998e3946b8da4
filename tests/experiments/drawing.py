"""Check that an error in a figure does not cost the results of an experiment."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure


def assert_no_figure_costs_results(run, config, workdir):
    """Continues a finished run while no figure can be drawn, and checks its results."""

    def fail(*_, **__):
        raise RuntimeError("A mistake of ours.")

    (workdir / "results.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "__init__", fail)
        with pytest.raises(RuntimeError, match=r"(?s)ours\..*results\.json is whole"):
            run(config, workdir)
    assert (workdir / "results.json").exists()

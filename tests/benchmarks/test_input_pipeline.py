"""The line that says whether a folder or a bucket feeds a pod."""

import re
import sys

import pytest

from benchmarks import input_pipeline, local_bucket
from tests.experiments.vit import prepared


@pytest.mark.parametrize(("step_seconds", "end"), [(1e6, "it feeds the pod."), (1e-9, " s.")])
def test_a_bucket_is_judged(tmp_path, monkeypatch, capsys, step_seconds, end):
    prepared.write(tmp_path, train=40, validation=4)
    options = {"hosts": 2, "batch_size": 16, "num_workers": 0, "shuffle_window": 8, "batches": 3}
    argv = [f"--{name}={value}" for name, value in options.items()]
    argv += [f"--data_dir={local_bucket.BUCKET}", f"--step_seconds={step_seconds}"]
    monkeypatch.setattr(sys, "argv", ["input_pipeline", *argv])
    with local_bucket.serve(tmp_path) as server:
        input_pipeline.main()
    assert server.requests > 2
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"A host reads [\d,]+ images/s and needs [\d,]+: ", line)
    assert line.endswith(end)
    assert ("starves" in line) == (step_seconds < 1)


def test_data_that_is_not_there_is_told_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["input_pipeline", f"--data_dir={tmp_path}"])
    with pytest.raises(SystemExit, match="There is no imagenet2012 in"):
        input_pipeline.main()

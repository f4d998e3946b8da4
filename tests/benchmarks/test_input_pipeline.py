"""The line that says whether a folder or a bucket feeds a pod."""

import os
import re
import sys
import urllib.request

import pytest
from etils import epath
from etils.epath import backend

from benchmarks import input_pipeline, local_bucket
from experiments.harness.mistakes import UserError
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


def test_missing_data_are_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["input_pipeline", f"--data_dir={tmp_path}"])
    with pytest.raises(SystemExit, match="There is no imagenet2012 in"):
        input_pipeline.main()


@pytest.mark.fast
@pytest.mark.parametrize("flags", [("--hosts=0",), ("--hosts=64", "--batch_size=4160")])
def test_hosts_share_pairs_of_images(monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["input_pipeline", "--data_dir=x", *flags])
    with pytest.raises(SystemExit):
        input_pipeline.main()
    match = (
        r"--hosts must be at least 1 and --batch_size a multiple of twice that, got (0|64) and 4"
    )
    assert re.search(match, capsys.readouterr().err)


@pytest.mark.fast
def test_a_bucket_is_gone_after_an_error(tmp_path):
    (tmp_path / "here").touch()

    def fail():
        assert epath.Path(f"{local_bucket.BUCKET}/here").exists()
        addresses.append(os.environ["CLOUD_STORAGE_EMULATOR_ENDPOINT"])
        raise UserError("The data is damaged")

    addresses = []
    with pytest.raises(UserError, match="is damaged"), local_bucket.serve(tmp_path):
        fail()
    assert backend.fsspec_backend._get_filesystem.cache_info().currsize == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(*addresses)

import errno
import shutil

import pytest
from etils import epath

from experiments.harness import storage
from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.metrics import mirror
from experiments.vit.metrics.mirror import Mirror
from tests.experiments.vit import tiny
from tests.experiments.vit.metrics.test_log import assert_same_rows, read_events, read_rows

NAMES = {"config.json", "metrics.csv", "results.json", "curves.png"}


@pytest.fixture
def failing(monkeypatch):
    """Makes the next writes to the mirror fail, and no call wait."""
    errors = []
    write = epath.Path("/").__class__.write_bytes

    def write_or_fail(self, content):
        if "mirror" in str(self) and errors:
            raise errors.pop(0)
        return write(self, content)

    monkeypatch.setattr(epath.Path("/").__class__, "write_bytes", write_or_fail)
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    return errors


@pytest.mark.slow
def test_a_run_is_mirrored(tmp_path):
    there = tmp_path / "bucket" / "run"
    train.train(tiny.get_config(mirror=str(there), eval_interval=2), tmp_path / "run")
    for name in NAMES:
        assert (there / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert_same_rows(read_events(there), read_rows(tmp_path / "run"))


def test_results_are_copied_last(tmp_path, monkeypatch):
    """``tools.spot`` deletes a slice when it finds them."""
    for name in NAMES:
        (tmp_path / name).touch()
    written = []
    monkeypatch.setattr(Mirror, "_write", lambda _, target, content: written.append(target.name))
    with Mirror(tmp_path, "bucket", writes=True) as copy:
        copy.finish()
    assert {*written} == NAMES
    assert written[-1] == "results.json"


@pytest.mark.slow
def test_the_same_command_mirrors_results_that_could_not_be(tmp_path, failing, monkeypatch):
    config = tiny.get_config(mirror=str(tmp_path / "mirror"), num_steps=3)
    finish = train.log.finish

    def finish_and_fail(*args):
        finish(*args)
        failing.append(PermissionError("403"))

    monkeypatch.setattr(train.log, "finish", finish_and_fail)
    with pytest.raises(UserError, match=r"mirror cannot be written: .*403.* results are in"):
        train.train(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "mirror")
    failing.clear()
    other = tiny.get_config(mirror=str(tmp_path / "mirror"), num_steps=4)
    for given, mirrored in ((other, False), (config, True)):
        with pytest.raises(UserError, match="already holds a run"):
            train.train(given, tmp_path / "run")
        assert (tmp_path / "mirror" / "results.json").exists() == mirrored


@pytest.mark.fast
def test_what_has_grown_is_copied_and_nothing_else(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    event = tmp_path / "tensorboard" / "events"
    event.write_text("1")
    (tmp_path / "config.json").write_text("{}")
    with Mirror(tmp_path, str(tmp_path / "mirror"), writes=True) as copy:
        copy.finish()
        (tmp_path / "mirror" / "config.json").unlink()
        event.write_text("1 2")
    assert (tmp_path / "mirror" / "tensorboard" / "events").read_text() == "1 2"
    assert not (tmp_path / "mirror" / "config.json").exists()


@pytest.mark.fast
@pytest.mark.parametrize(("folder", "writes"), [("", True), ("mirror", False)])
def test_others_copy_nothing(tmp_path, folder, writes):
    (tmp_path / "config.json").write_text("{}")
    with Mirror(tmp_path, folder and str(tmp_path / folder), writes=writes) as copy:
        copy.start()
        copy.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.fast
def test_a_fault_that_passes_is_no_news(tmp_path, failing):
    (tmp_path / "config.json").write_text("{}")
    failing += [TimeoutError("busy"), ConnectionResetError("reset")]
    with Mirror(tmp_path, str(tmp_path / "mirror"), writes=True) as copy:
        copy.start()
    assert (tmp_path / "mirror" / "config.json").read_text() == "{}"
    assert not failing


@pytest.mark.fast
def test_a_full_bucket_is_a_warning_and_an_error_at_the_end(tmp_path, failing):
    (tmp_path / "config.json").write_text("{}")
    full = OSError(errno.ENOSPC, "No space left")
    failing += [full, full]
    copy = Mirror(tmp_path, str(tmp_path / "mirror"), writes=True)
    copy.start()
    with (
        pytest.warns(UserWarning, match="mirror lacks the last rows: .*No space left"),
        pytest.raises(
            UserError, match=r"mirror cannot be written: .*No space left.* results are in"
        ),
    ):
        copy.finish()
    with copy:  # What it lacks comes with the next copy.
        pass
    assert (tmp_path / "mirror" / "config.json").read_text() == "{}"


@pytest.mark.fast
@pytest.mark.parametrize("of_run", [False, True])
def test_the_error_of_the_run_is_the_one_to_see(tmp_path, monkeypatch, of_run):
    monkeypatch.setattr(mirror.Mirror, "_copy", lambda self: 1 / 0)
    copy = Mirror(tmp_path, str(tmp_path / "mirror"), writes=True)
    if of_run:
        with pytest.raises(UserError, match="loss is nan"), copy:
            raise UserError("The training loss is nan")
    else:
        with pytest.raises(ZeroDivisionError), copy:
            copy.start()
    with pytest.raises(RuntimeError, match="after shutdown"):
        copy.start()


@pytest.mark.fast
def test_a_bug_keeps_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror.Mirror, "_copy", lambda self: 1 / 0)
    copy = Mirror(tmp_path, str(tmp_path / "mirror"), writes=True)
    copy.start()
    with pytest.raises(ZeroDivisionError):
        copy.finish()

"""Checks that each benchmark explains itself, and measures nothing where it is called wrongly."""

import importlib
import pathlib

import pytest

from benchmarks import decoding

pytestmark = pytest.mark.fast
FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(file.stem for file in FOLDER.glob("*.py") if "if __name__ ==" in file.read_text())


@pytest.fixture(params=PROGRAMS)
def program(request):
    try:
        return importlib.import_module(f"benchmarks.{request.param}")
    except ModuleNotFoundError as error:  # Such as the wheel libtpu.
        pytest.skip(str(error))


def test_help_shows_what_is_measured(program, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["program", "--help"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 0
    assert program.__doc__.strip() in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_unknown_flag_is_refused(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--unknown"])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert "usage: " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--sequences=0", "--heads=-1"])
def test_nothing_cannot_be_decoded(monkeypatch, capsys, flag):
    monkeypatch.setattr("sys.argv", ["program", flag])
    with pytest.raises(SystemExit, match="2"):
        decoding.main()
    assert "--sequences and --heads must be at least 1, got " in capsys.readouterr().err

import errno
import json

import pytest

from experiments.harness import files
from experiments.harness.mistakes import UserError

pytestmark = pytest.mark.fast


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is damaged: Expecting value: line 1"),
        (b'{"seed": 3, "mod', "is damaged: Unterminated string"),
        (b"\xff\xfe\xfd", "is damaged: .* can't decode"),
        (b"[" * 10**5, "is damaged: maximum recursion depth"),
        (b"[1, 2]", r"is damaged: it must hold a JSON object, got \[1, 2\]"),
        (None, "cannot be read: .*Is a directory"),
    ],
)
def test_damaged_json_is_named(tmp_path, content, match):
    path = tmp_path / "results.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=f"results.json {match}"):
        files.read_json(path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "table.md"
    with files.whole_file(path) as partial:
        partial.write_text("whole")

    def write_half():
        with files.whole_file(path) as partial:
            partial.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"table.md cannot be written: .*No space left"):
        write_half()
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_drawing_says_that_the_results_are_whole(tmp_path):
    match = r"results\.json is whole; the same command draws what is missing"
    with pytest.raises(ZeroDivisionError, match=match), files.drawing(tmp_path):
        raise ZeroDivisionError

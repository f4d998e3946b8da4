"""Tests of storage faults, which are neither damaged files nor bugs."""

import errno

import pytest

from experiments.harness import storage
from experiments.harness.mistakes import UserError

pytestmark = pytest.mark.fast

ABSENT = "NOT_FOUND: Error writing local file"
FULL = "OUT_OF_RANGE: Failed to write 9 bytes to file 8: File too large [os_error_code='27']"


def error_of(package):
    """Returns an error whose type a package defines."""
    return type("HttpError", (Exception,), {"__module__": f"{package}.retry"})("503")


def raised_from(error, cause):
    error.__cause__ = cause
    return error


FAULTS = {
    "full": OSError(28, "No space left on device"),
    "I/O": OSError(5, "Input/output error"),
    "permission": PermissionError(13, "Permission denied"),
    "timeout": TimeoutError(),
    "TensorStore, full": ValueError(FULL),
    "TensorStore, permission": ValueError("PERMISSION_DENIED: Error reading gs://bucket/run"),
    "TensorStore, busy": ValueError("UNAVAILABLE: Error reading gs://bucket/run"),
    "client": error_of("gcsfs"),
    "no client": ImportError("Please install gcsfs", name="gcsfs"),
    "cause": raised_from(Exception("Encountered error while reading"), ValueError(FULL)),
}
ABSENCES = {
    "no file": FileNotFoundError(2, "No such file or directory"),
    "folder": IsADirectoryError(21, "Is a directory"),
    "file": NotADirectoryError(20, "Not a directory"),
    "TensorStore": ValueError(ABSENT),
    "cause": raised_from(Exception("Encountered error while reading"), ValueError(ABSENT)),
}
OTHERS = {
    "damage": ValueError("DATA_LOSS: Error decoding manifest"),
    "damage of a length": ValueError("OUT_OF_RANGE: Requested byte range [0, 9) is not valid"),
    "text": ValueError("The status NOT_FOUND: is unknown."),
    "type": TypeError("restore() got an unexpected keyword"),
    "attribute": AttributeError("'dict' object has no attribute 'name'"),
    "another package": ImportError("No module named 'zarr'", name="zarr"),
    "of another package": error_of("orbax"),
}


@pytest.mark.parametrize("error", [*FAULTS.values(), *ABSENCES.values()], ids=[*FAULTS, *ABSENCES])
def test_faults_are_reported_as_mistakes_of_the_user(error):
    def make_error(cause):
        return UserError(f"Nothing was read: {cause}")

    with (
        pytest.raises(UserError, match=r"^Nothing was read: .") as raised,
        storage.faults(make_error),
    ):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as raised, storage.faults(UserError):
        raise error
    assert raised.value is error


def test_a_fault_in_the_midst_of_which_a_bug_came_up_does_not_hide_it():
    bug = KeyError("step")
    bug.__context__ = FAULTS["full"]
    with pytest.raises(KeyError), storage.faults(UserError):
        raise bug


def test_an_error_of_orbax_in_the_midst_of_a_fault_tells_of_the_fault():
    code = """
def clean_up(fault):
    try:
        raise fault
    except OSError:
        raise AttributeError("nothing to clean up")
"""
    orbax = {"__name__": "orbax.checkpoint"}
    exec(code, orbax)
    full = r"^\[Errno 28\] No space left on device$"
    with pytest.raises(UserError, match=full), storage.faults(UserError):
        orbax["clean_up"](OSError(errno.ENOSPC, "No space left on device"))
    elsewhere = {"__name__": "experiments.vit"}
    exec(code, elsewhere)
    with pytest.raises(AttributeError, match="nothing to clean up"), storage.faults(UserError):
        elsewhere["clean_up"](OSError(errno.ENOSPC, "No space left on device"))


def test_errors_that_lead_to_each_other_are_read_once():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert not storage.is_fault(first)
    assert storage.one_line_message(first) == "first"


def test_an_error_of_orbax_in_the_midst_of_a_fault_elsewhere_passes():
    orbax = {"__name__": "orbax.checkpoint"}
    exec('def restore():\n    raise KeyError("not what was saved")', orbax)

    def restore_after_a_fault():
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            orbax["restore"]()

    with pytest.raises(KeyError, match="not what was saved"), storage.faults(UserError):
        restore_after_a_fault()


@pytest.mark.parametrize("error", ABSENCES.values(), ids=ABSENCES)
def test_what_is_not_there_is_an_absence(error):
    assert storage.is_absence(error)


@pytest.mark.parametrize("error", [*FAULTS.values(), *OTHERS.values()], ids=[*FAULTS, *OTHERS])
def test_what_fails_is_no_absence(error):
    assert not storage.is_absence(error)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FAULTS["full"], "[Errno 28] No space left on device"),
        (FAULTS["cause"], FULL),
        (ValueError("Cut off [tensorstore_spec='{...}']\nand more"), "Cut off"),
        (KeyError("key_type"), "KeyError: 'key_type'"),
        (TimeoutError(), "TimeoutError: "),
        (UserError("Run is not what was saved"), "Run is not what was saved"),
    ],
    ids=["of the system", "cause", "of TensorStore", "of a type", "without a message", "mistake"],
)
def test_an_error_becomes_one_line(error, line):
    assert storage.one_line_message(error) == line


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (TimeoutError("slow"), True),
        (ConnectionResetError("reset"), True),
        (OSError(errno.EIO, "I/O error"), True),
        (ValueError("UNAVAILABLE: Error reading gs://bucket"), True),
        (ValueError("PERMISSION_DENIED: Error reading gs://bucket"), False),
        (OSError(errno.ENOSPC, "No space left"), False),
        (PermissionError("403"), False),
        (FileNotFoundError("gone"), False),
        (ValueError("a bug"), False),
    ],
    ids=repr,
)
def test_transient_faults_are_tried_again(error, transient):
    calls = []

    def call():
        calls.append(1)
        if len(calls) < 3:
            raise error
        return "content"

    if transient:
        assert storage.retried(call, waits=(0, 0)) == "content"
    else:
        with pytest.raises(type(error)):
            storage.retried(call, waits=(0, 0))
    assert len(calls) == (3 if transient else 1)


def test_a_fault_that_stays_is_raised():
    with pytest.raises(TimeoutError, match="slow"):
        storage.retried(lambda: (_ for _ in ()).throw(TimeoutError("slow")), waits=(0,))

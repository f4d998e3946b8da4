"""XLA flags with which programs compile quickly on the CPU, whatever their speed then."""

import importlib.util
import mmap
import pathlib


def is_known(name):
    """Returns True if the installed jaxlib has a flag of XLA; any other ends the process."""
    [folder] = importlib.util.find_spec("jaxlib").submodule_search_locations
    for library in pathlib.Path(folder).glob("*.so"):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content.find(f"\0{name}\0".encode()) >= 0:  # A string of its own.
                return True
    return False


FLAGS = " ".join(
    f"--{name}={value}"
    for name, value in {
        "xla_backend_optimization_level": 0,
        # The newer code generator takes up to six times as long for programs with many fusions.
        "xla_cpu_use_fusion_emitters": "false",
        # Two test processes keep two cores busy, and splitting a program costs time and memory.
        "xla_cpu_parallel_codegen_split_count": 1,
    }.items()
    if is_known(name)
)


def flags(given: str) -> str:
    """Returns the flags for the CPU, with those that the user gave.

    Programs are compiled as users compile them if the user says how far to optimize them.
    """
    return given if "xla_backend_optimization_level" in given else f"{FLAGS} {given}"

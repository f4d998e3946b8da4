"""XLA flags with which programs compile quickly on the CPU, whatever their speed then."""

import importlib.util
import mmap
import pathlib


def _is_known(name):
    """Returns True if the installed jaxlib has a flag of XLA; any other ends the process."""
    [folder] = importlib.util.find_spec("jaxlib").submodule_search_locations
    for library in pathlib.Path(folder).glob("*.so"):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content.find(name.encode()) >= 0:
                return True
    return False


FLAGS = " ".join(
    f"--{name}={value}"
    for name, value in {
        "xla_backend_optimization_level": 0,
        # The newer code generator takes up to six times as long for programs with many fusions.
        "xla_cpu_use_fusion_emitters": "false",
    }.items()
    if _is_known(name)
)

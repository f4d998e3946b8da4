"""The length of the schedules of a TPU program, as the compiler in the `libtpu` wheel writes them.

The compiler writes the schedule of each operation and of each Pallas kernel: VLIW bundles, about
one for each cycle that does not wait for memory. This is the one unit in which both can be
compared: XLA estimates no kernel, and its estimates of its own operations (``benchmarks.tpu``) hold
waits and fixed costs. An operation is a loop over windows of its output. A kernel runs its bundles
once for each step of its grid, except those of a region under a condition (``pl.when``), which
this module counts as often as the condition holds.
"""

import atexit
import math
import os
import pathlib
import re
import shutil
import tempfile

FOLDER = pathlib.Path(tempfile.gettempdir(), f"schedules-{os.getpid()}")


def record():
    """Has the compiler write schedules to ``FOLDER``, if nothing has loaded libtpu yet."""
    FOLDER.mkdir()
    atexit.register(shutil.rmtree, FOLDER)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(
        [
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            f"--xla_jf_dump_to={FOLDER}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_emit_annotations=true",
        ]
    )


def bundles(name, steps, counts=(), *, shortest=64):
    """Returns the bundles of a kernel, each as often as it runs.

    Args:
      name: Name of the kernel.
      steps: Steps of its grid.
      counts: In how many steps each region under a condition runs, in the order of the program, or
        a function that returns this for the list of their bundles.
      shortest: Bundles of a region; shorter ones move blocks, and are counted in each step.

    Raises:
      ValueError: If there is no such kernel, or it has another number of regions.
    """
    found = [
        path
        for path in FOLDER.glob("*-final_bundles.txt")
        if re.search(rf"-{name}(\.\d+)?-\d+-final_bundles\.txt$", path.name)
    ]
    if not found:
        raise ValueError(f"There is no schedule of a kernel {name}.")
    text = max(found, key=lambda path: path.stat().st_mtime).read_text()
    total = 1 + max(int(address, 16) for address in re.findall(r"^ *(0x[0-9a-f]+) ", text, re.M))
    regions = [size for size in _regions(text) if size > shortest] if counts else []
    counts = counts(regions) if callable(counts) else counts
    if len(regions) != len(counts):
        raise ValueError(f"{name} has regions of {regions} bundles, and counts are {counts}.")
    inside = sum(size * count for size, count in zip(regions, counts, strict=True))
    return inside + (total - sum(regions)) * steps


def operation_bundles(lines):
    """Returns the bundles of the operations of a compiled program, without its Pallas kernels.

    An operation runs its loop once for each window of its output. Where the program does not state
    how many there are, and inside the inner loops that few changes of layout have, the loop counts
    once, so that the sum is then a lower bound. Operations without a schedule take a few bundles
    and count nothing.

    Args:
      lines: Pairs of a line of the program and the number of times that it runs, as
        ``tpu.executed`` returns them.
    """
    paths = {}
    for path in sorted(FOLDER.glob("*-final_bundles.txt"), key=lambda path: path.stat().st_mtime):
        match = re.match(r"\d+-(.+)-\d+-final_bundles\.txt$", path.name)
        if match:
            paths[match[1]] = path
    total = 0
    for line, times in lines:
        name = re.match(r" *(?:ROOT )?%?([\w.\-]+) = ", line)
        if not name or name[1] not in paths or "tpu_custom_call" in line:
            continue
        bounds = re.search(r'"iteration_bounds":\[([^\]]*)\]', line)
        iterations = math.prod(map(int, re.findall(r"\d+", bounds[1]))) if bounds else 1
        text = paths[name[1]].read_text()
        depths = re.findall(r"^ *0(?:x[0-9a-f]+)? +(?:[LPC][BFHET])? *: *((?:> ?)*)", text, re.M)
        inside = sum(">" in depth for depth in depths)
        total += times * (len(depths) - inside + inside * iterations)
    return total


def forget():
    """Removes all schedules."""
    shutil.rmtree(FOLDER)
    FOLDER.mkdir()


def _regions(text):
    """Returns the bundles of each region that a branch can skip, in order."""
    open_branches, sizes, is_loop = [], [], False
    for line in text.splitlines():
        match = re.match(r" *(0x[0-9a-f]+) +(LB|PF)?[^>]*(>+)", line)
        if not match:
            continue
        address = int(match[1], 16)
        if match[2] == "PF" and open_branches:
            sizes.append(address - open_branches.pop())
            open_branches.clear()
        # A loop inside the loop over the grid ends with a branch back to its beginning.
        is_loop = is_loop or (match[2] == "LB" and len(match[3]) > 1)
        if "sbr.rel" in line:
            if is_loop:
                is_loop = False
            else:
                open_branches.append(address)
    return sizes

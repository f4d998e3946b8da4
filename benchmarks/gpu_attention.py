"""Device times of attention on a GPU: the fused kernels, XLA and cuDNN's exact attention.

Attention of 12 heads of 64 dimensions in bfloat16, with 128 features, forward and with the
gradients of queries, keys and values; bidirectional, causal, packed with four segments, and beside
an exact band of 64 keys to each side. CUPTI times each kernel on the device, so that no time of the
host is in the numbers. A row is the median of nine runs, with the least and the most.

Run: python -m benchmarks.gpu_attention [--output gpu_attention.json]
"""

import itertools
import json
import multiprocessing
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line

HEADS, DIM, NUM_FEATURES, BANDWIDTH, RUNS = 12, 64, 128, 64, 9
SIZES = ((8, 1024), (8, 4096), (1, 16_384), (8, 512), (8, 256))  # Batch and length.
MODES = ("bidirectional", "causal", "band", "causal band", "packed", "causal packed")
PLAIN = MODES[:2]  # The modes that cuDNN has.
# How many of the sizes are measured.
PLAIN_SIZES = {"kernels": 5, "XLA": 3, "cuDNN": 5}
ORDERED_SIZES = {"kernels": 3, "XLA": 2}


def cases():
    """Yields what to measure: the candidate, the mode, the size, and whether with gradients."""
    for mode, size, name in itertools.product(MODES, SIZES, ("kernels", "XLA", "cuDNN")):
        most = PLAIN_SIZES if mode in PLAIN else ORDERED_SIZES
        if SIZES.index(size) >= most.get(name, 0):
            continue
        for backward in (False, True):
            names = ("candidate", "mode", "batch", "length", "backward")
            yield dict(zip(names, (name, mode, *size, backward), strict=True))


def attention_of(candidate, mode, shape):
    """Returns the attention of a candidate, a function of queries, keys, values and W."""
    is_causal = "causal" in mode
    if candidate == "cuDNN":

        def exact(q, k, v, w):
            del w
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=is_causal, implementation="cudnn"
            )

        return exact
    options = {"implementation": "pallas_gpu" if candidate == "kernels" else "xla"}
    if "band" in mode:
        options["exact_bandwidth"] = BANDWIDTH
    if "packed" in mode:
        batch, length = shape[:2]
        ends = length // 5, length // 2, 3 * length // 4
        ids = np.searchsorted(ends, np.arange(length), side="right")
        options["segment_ids"] = np.broadcast_to(ids, (batch, length))

    def attend(*arrays):
        return simrf_jax.random_feature_attention(*arrays, is_causal=is_causal, **options)

    return attend


def with_gradients(attend):
    """Returns a function that computes the gradients of queries, keys and values."""

    def gradients(q, k, v, w):
        def loss(q, k, v):
            return jnp.sum(jnp.square(attend(q, k, v, w).astype(jnp.float32)))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    return gradients


def program_of(case):
    """Returns the compiled program of a case, and its arrays."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (case["batch"], case["length"], HEADS, DIM)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    arrays.append(simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM))
    attend = attention_of(case["candidate"], case["mode"], shape)
    function = with_gradients(attend) if case["backward"] else attend
    return jax.jit(function).lower(*arrays).compile(), arrays


def microseconds(program, arrays):
    """Returns the least, the median and the largest time of all kernels of a program."""
    from jax.experimental.mosaic.gpu import profiler

    # One run at a time, because the kernels of an XLA program may begin in another order.
    measure = profiler.measure(program, aggregate=False)
    times = [1e3 * sum(ms for _, ms in measure(*arrays)[1]) for _ in range(RUNS)]
    return [round(float(x), 1) for x in np.percentile(times, [0, 50, 100])]


def work(cases, are_compiled, turn, rows):
    """Compiles some cases at the same time as other processes, then measures them in its turn."""
    try:
        programs = [program_of(case) for case in cases]
        are_compiled.wait()
        for case, (program, arrays) in zip(cases, programs, strict=True):
            with turn:
                rows.put(case | {"microseconds": microseconds(program, arrays)})
    except Exception as error:  # The main process would wait for ever.
        rows.put(error)
        raise


def main():
    """Measures all rows, and writes and prints them."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("gpu_attention.json"))
    output = parser.parse_args().output
    # Processes, because kernels are lowered in Python, of which a process runs one thread at once.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    processes, todo = multiprocessing.get_context("spawn"), list(cases())
    num = max(1, min(len(todo), os.cpu_count() or 1) - 1)
    shared = processes.Barrier(num), processes.Lock(), processes.Queue()
    workers = [
        processes.Process(target=work, args=(todo[i::num], *shared), daemon=True)
        for i in range(num)
    ]
    for worker in workers:
        worker.start()
    rows, device = [], jax.devices()[0].device_kind
    for _ in command_line.bar(todo, "measured"):
        row = shared[-1].get()
        if isinstance(row, Exception):
            raise row
        rows.append(row)
        command_line.show(str(rows[-1]))
        output.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

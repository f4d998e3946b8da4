"""Device times of attention on a GPU: the fused kernels, XLA and cuDNN's exact attention.

Attention of 12 heads of 64 dimensions in bfloat16, with 128 features, forward and with the
gradients of queries, keys and values. CUPTI times each kernel on the device, so that no time of
the host is in the numbers. A row is the median of nine runs, with the least and the most.

Run: python -m benchmarks.gpu_attention [--output gpu_attention.json]
"""

import itertools
import json
import os
import pathlib
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import attention_candidates, command_line

HEADS, DIM, NUM_FEATURES, RUNS = 12, 64, 128, 9
SIZES = ((8, 1024), (8, 4096), (1, 16_384), (8, 512), (8, 256))  # Batch and length.
LEAST_OF_XLA = 1024  # Its programs take the longest to compile.
CANDIDATES = {
    "kernels": attention_candidates.pallas_gpu,
    "XLA": attention_candidates.xla,
    "cuDNN": attention_candidates.cudnn,
}


def with_gradients(attend):
    """Returns a function that computes the gradients of queries, keys and values."""

    def gradients(q, k, v, w):
        def loss(q, k, v):
            return jnp.sum(jnp.square(attend(q, k, v, w).astype(jnp.float32)))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    return gradients


def program_of(name, size, *, is_causal, backward):
    """Returns the compiled program of one candidate, and its arrays."""
    batch, length = size
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, HEADS, DIM)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    arrays.append(simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM))

    def attend(*arrays):
        return CANDIDATES[name](*arrays, is_causal=is_causal)

    function = with_gradients(attend) if backward else attend
    return jax.jit(function).lower(*arrays).compile(), arrays


def microseconds(program, arrays):
    """Returns the least, the median and the largest time of all kernels of a program."""
    from jax.experimental.mosaic.gpu import profiler

    _, runs = profiler.measure(program, aggregate=False, iterations=RUNS)(*arrays)
    times = [1e3 * sum(ms for _, ms in run) for run in runs]
    return [round(float(x), 1) for x in np.percentile(times, [0, 50, 100])]


def main():
    """Measures all rows, and writes and prints them."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("gpu_attention.json"))
    output = parser.parse_args().output
    device = jax.devices()[0].device_kind
    cases = [
        {"candidate": name, "batch": batch, "length": length} | {"is_causal": x, "backward": y}
        for (batch, length), name, x, y in itertools.product(
            SIZES, CANDIDATES, (False, True), (False, True)
        )
        if name != "XLA" or length >= LEAST_OF_XLA
    ]

    def compiled(case):
        size = case["batch"], case["length"]
        kind = {name: case[name] for name in ("is_causal", "backward")}
        return program_of(case["candidate"], size, **kind)

    with futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        found = list(command_line.bar(pool.map(compiled, cases), "compiled", len(cases)))
    rows = []
    for case, (program, arrays) in zip(cases, found, strict=True):
        rows.append(case | {"microseconds": microseconds(program, arrays)})
        command_line.show(str(rows[-1]))
        output.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

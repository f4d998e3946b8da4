"""Device times of attention on a GPU: the fused kernels, XLA and cuDNN's exact attention.

Attention of 12 heads of 64 dimensions in bfloat16, with 128 features, forward and with the
gradients of queries, keys and values. CUPTI times each kernel on the device, so that no time of
the host is in the numbers. A row is the median of nine runs, with the least and the most.

Run: python -m benchmarks.gpu_attention [--output gpu_attention.json]
"""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import attention_candidates, command_line

HEADS, DIM, NUM_FEATURES, RUNS = 12, 64, 128, 9
SIZES = ((8, 256), (8, 512), (8, 1024), (8, 4096), (1, 16_384))  # Batch and length.
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


def microseconds(function, arrays):
    """Returns the time of all kernels of a function, of each run."""
    from jax.experimental.mosaic.gpu import profiler

    program = jax.jit(function).lower(*arrays).compile()
    measure = profiler.measure(program, aggregate=False, iterations=RUNS)
    _, runs = measure(*arrays)
    return [1e3 * sum(ms for _, ms in run) for run in runs]


def measure(name, size, *, is_causal, backward):
    """Returns a row of one candidate."""
    batch, length = size
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, length, HEADS, DIM)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    arrays.append(simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM))

    def attend(*arrays):
        return CANDIDATES[name](*arrays, is_causal=is_causal)

    times = microseconds(with_gradients(attend) if backward else attend, arrays)
    return {
        "candidate": name,
        "batch": batch,
        "length": length,
        "is_causal": is_causal,
        "backward": backward,
        "microseconds": [round(float(x), 1) for x in np.percentile(times, [0, 50, 100])],
    }


def main():
    """Measures all rows, and writes and prints them."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("gpu_attention.json"))
    output = parser.parse_args().output
    device = jax.devices()[0].device_kind
    rows = []
    cases = list(itertools.product((False, True), SIZES, (False, True), CANDIDATES))
    for is_causal, size, backward, name in command_line.bar(cases, "programs", len(cases)):
        rows.append(measure(name, size, is_causal=is_causal, backward=backward))
        least, median, most = rows[-1]["microseconds"]
        kind = ("causal" if is_causal else "bidirectional") + (", gradients" if backward else "")
        command_line.show(f"{name}, {size}, {kind}: {median} us ({least} to {most})")
        output.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

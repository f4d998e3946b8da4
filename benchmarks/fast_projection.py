"""Time and memory of fast projections against dense ones, by dimension.

The program projects 1,024 vectors to as many features as they have dimensions, by a dense matrix
and by ``draw_fast_projection``. The two alternate in one process. It draws
benchmarks/figures/fast_projection.png. With --tpu it compiles both for a TPU v5e instead (pip
install libtpu) and prints static cycles. With --radix it times the Hadamard transform alone, by the
radix of its stages.

Run: python -m benchmarks.fast_projection [--tpu | --radix]
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import timing
from simrf_jax._src.projections.hadamard import hadamard_transform

DIMS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
NUM_VECTORS, ROUNDS = 1024, 15
RADICES = (2, 4, 16, 64, 128)
FIGURE = pathlib.Path(__file__).parent / "figures" / "fast_projection.png"


def state_kib(projection):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(projection)) / 1024


def on_cpu():
    rows = []
    project = jax.jit(simrf_jax.project)
    for dim in DIMS:
        x = jax.random.normal(jax.random.key(0), (NUM_VECTORS, dim))
        fast = simrf_jax.draw_fast_projection(jax.random.key(1), dim, dim)
        dense = jax.random.normal(jax.random.key(2), (dim, dim))
        times = timing.alternate(
            {
                "dense": lambda _, x=x, w=dense: project(x, w),
                "fast": lambda _, x=x, w=fast: project(x, w),
            },
            ROUNDS,
        )
        rows.append((dim, times["dense"], times["fast"], state_kib(dense), state_kib(fast)))
    print("| dim | dense ms | fast ms | dense / fast, quartiles | dense KiB | fast KiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dim, dense, fast, dense_kib, fast_kib in rows:
        low, median, high = np.percentile(dense / fast, [25, 50, 75])
        print(
            f"| {dim:,} | {np.median(dense):.2f} | {np.median(fast):.2f} "
            f"| {median:.2f} ({low:.2f} to {high:.2f}) | {dense_kib:,.0f} | {fast_kib:.1f} |"
        )
    draw_figure(rows)


def draw_figure(rows):
    dims = [row[0] for row in rows]
    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for column, name, color, marker in ((1, "dense", "#0072B2", "o"), (2, "fast", "#D55E00", "s")):
        low, median, high = np.percentile([row[column] for row in rows], [25, 50, 75], axis=1)
        axes.fill_between(dims, low, high, color=color, alpha=0.25, linewidth=0)
        axes.plot(dims, median, color=color, marker=marker, markersize=4)
        axes.annotate(
            name,
            (dims[-1], median[-1]),
            (6, 0),
            textcoords="offset points",
            color=color,
            va="center",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(dims, [f"{dim:,}" for dim in dims], rotation=30)
    axes.set_xlim(dims[0] * 0.85, dims[-1] * 1.7)
    axes.set_xlabel("dimension, and number of features")
    axes.set_ylabel(f"ms for {NUM_VECTORS:,} vectors")
    axes.set_title("Projecting on two CPU cores (median, quartiles)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=160)


def on_tpu():
    from benchmarks import tpu

    print(
        "| dim | dense | fast | one transform | by butterflies |\n| --- | --- | --- | --- | --- |"
    )
    for dim in command_line.bar(DIMS[:-1], "compiled"):
        x = jax.ShapeDtypeStruct((NUM_VECTORS, dim), jnp.float32)
        dense = jax.ShapeDtypeStruct((dim, dim), jnp.float32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        fast = jax.eval_shape(lambda k, d=dim: simrf_jax.draw_fast_projection(k, d, d), key)
        compiled = [
            tpu.compile_for(simrf_jax.project, x, dense),
            tpu.compile_for(simrf_jax.project, x, fast),
            tpu.compile_for(hadamard_transform, x),
            tpu.compile_for(lambda x: hadamard_transform(x, radix=2), x),
        ]
        cells = [f"{tpu.static_cycles(program)[0] / 1e3:,.0f}" for program in compiled]
        command_line.show(f"| {dim:,} | {' | '.join(cells)} |")


def by_radix():
    print("| dim | " + " | ".join(f"radix {radix}" for radix in RADICES) + " |")
    print("| --- |" + " --- |" * len(RADICES))
    for dim in DIMS[2::2]:
        x = jax.random.normal(jax.random.key(0), (NUM_VECTORS, dim))
        transforms = {}
        for radix in RADICES:
            transform = jax.jit(lambda x, r=radix: hadamard_transform(x, radix=r))
            transforms[radix] = lambda _, f=transform, x=x: f(x)
        times = timing.alternate(transforms, ROUNDS)
        print(f"| {dim:,} | " + " | ".join(f"{np.median(ms):.2f}" for ms in times.values()) + " |")


def main():
    parser = command_line.parser(__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--tpu", action="store_true", help="count cycles of a TPU v5e")
    choice.add_argument("--radix", action="store_true", help="time the Hadamard transform alone")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.tpu:
        on_tpu()
    elif options.radix:
        by_radix()
    else:
        on_cpu()


if __name__ == "__main__":
    main()

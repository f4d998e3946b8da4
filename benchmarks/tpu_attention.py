"""Fused kernels, XLA and exact attention on a TPU, as its compiler counts them without a device.

Compiles for one v5e device, which need not be there, and measures no time. A Pallas kernel is
counted in bundles of its schedule, as often as they run. Bundles hold no wait for memory. All else
is counted in XLA's own estimates (``estimated_cycles``), which hold waits for memory and fixed
costs: those of the batched products of attention are two to five times the bundles of the same
operations. So the columns of the two can be neither added nor compared. The bytes of queries, keys,
values and outputs (and, with the gradient, of all their gradients), moved once, are given in cycles
at 546 bytes each.

Run: python -m benchmarks.tpu_attention [LENGTH ...] (with the libtpu wheel, and JAX_PLATFORMS=cpu)
With --causal before the lengths it counts causal attention, whose tiles take the usual way
(``simrf_jax/_src/attention/pallas_tpu/weights.py`` says which that is).
With --band BANDWIDTH queries see the keys that are so near exactly, and with --packed those of
their own segment alone, in either.
With --program TOPOLOGY HEADS LENGTH FEATURES it prints the bundles of a program of both kernels.
"""

import functools
from typing import NamedTuple

from benchmarks import schedule  # Before libtpu is loaded.

# isort: split
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

import simrf_jax
from benchmarks import command_line, tpu
from simrf_jax import feature_maps
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_tpu.operands import band_of, lay_out, lay_out_near, shape_of

BATCH, HEADS, DIM = 8, 12, 64
LENGTHS = (197, 1024, 4096)
SPLASH_BLOCK = 512  # Queries and keys of a block.
BYTES_PER_CYCLE = 546  # v5e: 819 GB/s and 1.5 GHz.
COLUMNS = (
    "bundles in Pallas kernels, forward",
    "with backward",
    "XLA's estimate of the rest, forward",
    "with backward",
)


def tokens(length):
    return jax.ShapeDtypeStruct((BATCH, length, HEADS, DIM), jnp.bfloat16)


def both_ways(attend):
    """Returns a function of the arguments of ``attend`` and of the gradient of the outputs."""

    def run(of_outputs, q, k, v, *others):
        out, back = jax.vjp(lambda *tokens: attend(*tokens, *others), q, k, v)
        return out, back(of_outputs)

    return run


class Mode(NamedTuple):
    """A kind of attention: causal or not, the bandwidth of exact keys, packed or not."""

    is_causal: bool = False
    bandwidth: int | None = None
    is_packed: bool = False


def random_features(implementation, mode):
    def attend(q, k, v, w, feature_map, segment_ids=None):
        return simrf_jax.random_feature_attention(
            q,
            k,
            v,
            w,
            feature_map=feature_map,
            implementation=implementation,
            is_causal=mode.is_causal,
            exact_bandwidth=mode.bandwidth,
            segment_ids=segment_ids,
        )

    return attend


def rows_of(num_features):
    return jax.ShapeDtypeStruct((HEADS, num_features, DIM), jnp.float32)


def textbook(q, k, v, w):
    """Attends as the known implementations do, with one maximum and an epsilon."""

    def phi(x, axes):
        logits = jnp.einsum("bthd,hmd->bthm", x.astype(jnp.float32) * DIM**-0.25, w)
        scale = jnp.sum(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) * DIM**-0.5 / 2
        largest = jax.lax.stop_gradient(jnp.max(logits, axes, keepdims=True))
        return (jnp.exp(logits - scale - largest) + 1e-4) * w.shape[1] ** -0.5

    of_queries, of_keys = phi(q, -1), phi(k, (1, 3))
    sums = jnp.einsum("bshm,bshd->bhmd", of_keys, v.astype(jnp.float32))
    normalizer = jnp.einsum("bthm,bhm->bth", of_queries, jnp.sum(of_keys, 1))
    out = jnp.einsum("bthm,bhmd->bthd", of_queries, sums) / normalizer[..., None]
    return out.astype(q.dtype)


def kernel_bundles(projection, feature_map, length, mode, *, is_gradient):
    """Returns the bundles of the fused kernels that were compiled last."""

    def shape(projection, feature_map):
        zeros = jnp.zeros((BATCH, length, HEADS, DIM), jnp.bfloat16)
        return lay_out(Call(zeros, zeros, zeros), projection, feature_map)

    refs = jax.eval_shape(shape, projection, feature_map)
    sizes = shape_of(refs, interpret=False, is_causal=mode != Mode())
    if mode.bandwidth is not None or (mode.is_packed and not mode.is_causal):
        kinds = ["causal_random_feature_sums", "reversed_random_feature_sums"][: 2 - mode.is_causal]
        far = sum(in_order_bundles(sizes, kind, is_gradient) for kind in kinds)
        near = 0 if mode.bandwidth is None else near_bundles(length, mode, is_gradient)
        return far + near
    if mode.is_causal:
        return in_order_bundles(sizes, "causal_random_feature_attention", is_gradient)
    programs = BATCH * HEADS // sizes.num_heads
    keys, queries = sizes.key_tiles, sizes.query_tiles
    names = ["random_feature_attention", "random_feature_attention_gradient"]
    if not sizes.is_tiled:
        grids = [(1, ()), (1, ())]
    else:
        grids = [
            (keys + queries, (1, keys, 1, queries)),
            (2 * keys + queries, (1, keys, 1, 1, queries, keys)),
        ]
    run = len(grids) if is_gradient else 1
    return programs * sum(
        schedule.bundles(name, steps=steps, counts=counts)
        for name, (steps, counts) in zip(names[:run], grids[:run], strict=True)
    )


def in_order_bundles(sizes, kind, is_gradient):
    """Returns the bundles of the kernels that take tiles in order, of which no tile is rare."""
    tiles = sizes.key_tiles
    # A program begins, and each of its steps leaves out the rare way.
    counts = {"": (1, 0, tiles)}
    if is_gradient:
        # The reversed kernel resets its sums without a branch.
        begins = (1,) if kind.startswith("reversed") else (1, 1)
        counts |= {"_query_gradient": (1, 0, tiles), "_key_gradient": (*begins, 0, tiles)}
    return (BATCH * HEADS // sizes.num_heads) * sum(
        schedule.bundles(f"{kind}{which}", steps=tiles, counts=regions, shortest=150)
        for which, regions in counts.items()
    )


def near_bundles(length, mode, is_gradient):
    """Returns the bundles of the kernels of a band."""

    def band():
        zeros = jnp.zeros((BATCH, length, HEADS, DIM), jnp.bfloat16)
        return lay_out_near(Call(zeros, zeros, zeros), mode.bandwidth)

    refs = jax.eval_shape(band)
    bandwidth, is_causal = mode.bandwidth, mode.is_causal
    sizes = band_of(refs, interpret=False, bandwidth=bandwidth, is_causal=is_causal).shape
    names = ["sums_in_a_band", "sums_in_a_band_gradient"]
    steps = BATCH * HEADS // sizes.num_heads * sizes.query_tiles
    return sum(schedule.bundles(name, steps=steps) for name in names[: 1 + is_gradient])


def splash(length, *, is_causal):
    """Returns exact attention by JAX's splash attention, and its blocks on each side."""
    sizes = splash_attention_kernel.BlockSizes(
        **dict.fromkeys(
            (
                "block_q",
                "block_kv",
                "block_kv_compute",
                "block_q_dkv",
                "block_kv_dkv",
                "block_kv_dkv_compute",
                "block_q_dq",
                "block_kv_dq",
            ),
            SPLASH_BLOCK,
        )
    )
    kind = splash_attention_mask.CausalMask if is_causal else splash_attention_mask.FullMask
    mask = splash_attention_mask.MultiHeadMask([kind((length, length))] * HEADS)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes)

    def attend(q, k, v):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * DIM**-0.5, k, v))
        return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)

    return attend, length // SPLASH_BLOCK


def splash_bundles(blocks, *, is_causal, is_gradient):
    """Returns the bundles of splash attention's kernels that were compiled last."""
    # Each begins, takes one block, and ends: under conditions on the step.
    seen = blocks * (blocks + 1) // 2 if is_causal else blocks**2
    count = functools.partial(schedule.bundles, steps=blocks**2, counts=(blocks, seen, blocks))
    if not is_gradient:
        return BATCH * HEADS * count("splash_mha_fwd_no_residuals")
    names = (
        "splash_mha_fwd_residuals",
        "splash_mha_dq_no_residuals",
        "splash_mha_dkv_no_residuals",
    )
    return BATCH * HEADS * sum(map(count, names))


def measure(attend, length, *others, of_kernels=None):
    """Returns bundles in kernels and XLA's estimates, each forward and of both passes.

    Args:
      attend: Function of queries, keys, values and others.
      length: Number of tokens.
      others: Further arguments, which are not known while compiling.
      of_kernels: Function of ``is_gradient`` that returns the bundles in kernels; None if there are
        none, and the bundles are then None.
    """
    bundles, estimates = [], []
    for is_gradient in (False, True):
        schedule.forget()
        function, number = (both_ways(attend), 4) if is_gradient else (attend, 3)
        compiled = tpu.compile_for(function, *[tokens(length)] * number, *others)
        bundles.append(of_kernels(is_gradient=is_gradient) if of_kernels else None)
        estimates.append(tpu.static_cycles(compiled)[0])
    return bundles, estimates


def rows(length, mode):
    """Yields the name of each attention, and its four numbers that ``measure`` returns."""
    positive = feature_maps.Positive()
    calibrated = feature_maps.Calibrated.identity(HEADS, DIM)
    pairs = simrf_jax.Projection(rows_of(64), is_paired=True)
    folded = jax.eval_shape(feature_maps.Folded.of, calibrated, pairs)
    in_kernels = random_features("pallas_tpu", mode)
    segments = [jax.ShapeDtypeStruct((BATCH, length), jnp.int32)] * mode.is_packed
    for name, projection, feature_map in (
        ("kernels, m = 128", rows_of(128), positive),
        ("kernels, m = 130", rows_of(130), positive),
        ("kernels, 64 pairs", pairs, positive),
        ("kernels, calibrated, m = 128", rows_of(128), calibrated),
        ("kernels, calibrated, 64 pairs", pairs, calibrated),
        ("kernels, calibrated, 64 pairs, folded before", None, folded),
    ):
        count = functools.partial(kernel_bundles, projection, feature_map, length, mode)
        others = (projection, feature_map, *segments)
        yield name, *measure(in_kernels, length, *others, of_kernels=count)
    by_xla = random_features("xla", mode)
    for num_features in (128, 130):
        others = (rows_of(num_features), positive, *segments)
        yield f"XLA, m = {num_features}", *measure(by_xla, length, *others)
    if mode == Mode():
        yield "textbook, m = 130", *measure(textbook, length, rows_of(130))
    exact = functools.partial(jax.nn.dot_product_attention, is_causal=mode.is_causal)
    yield "exact, jax.nn.dot_product_attention", *measure(exact, length)
    if length % SPLASH_BLOCK == 0:
        attend, blocks = splash(length, is_causal=mode.is_causal)
        count = functools.partial(splash_bundles, blocks, is_causal=mode.is_causal)
        yield "exact, splash attention", *measure(attend, length, of_kernels=count)


def program(topology, heads, length, num_features):
    """Returns the bundles of the kernels of both passes for one sequence that a program takes."""
    x = jax.ShapeDtypeStruct((1, length, heads, DIM), jnp.bfloat16)

    attend = both_ways(random_features("pallas_tpu", Mode()))
    w = jax.ShapeDtypeStruct((heads, num_features, DIM), jnp.float32)
    tpu.compile_for(attend, *[x] * 4, w, feature_maps.Positive(), topology=topology)
    names = ("random_feature_attention", "random_feature_attention_gradient")
    return sum(schedule.bundles(name, steps=1) for name in names)


def main():
    """Prints a table for each length."""
    parser = command_line.parser(__doc__)
    parser.add_argument("lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--band", type=int, metavar="BANDWIDTH")
    parser.add_argument("--packed", action="store_true")
    sizes = ("TOPOLOGY", "HEADS", "LENGTH", "FEATURES")
    parser.add_argument("--program", nargs=len(sizes), metavar=sizes)
    options = parser.parse_args()
    if options.program:
        topology, *sizes = options.program
        print(program(topology, *map(int, sizes)))
        return
    mode = Mode(options.causal, options.band, options.packed)
    for length in options.lengths:
        print(f"\n| T = {length}, thousands | {' | '.join(COLUMNS)} |\n|{' --- |' * 5}")
        for name, bundles, estimates in command_line.bar(rows(length, mode), "rows"):
            cells = ["" if x is None else f"{x / 1e3:,.0f}" for x in (*bundles, *estimates)]
            command_line.show(f"| {name} | {' | '.join(cells)} |")
        moved = BATCH * HEADS * DIM * length * 2 / BYTES_PER_CYCLE / 1e3
        print(f"\nMoving all tokens once: {4 * moved:,.0f} and {11 * moved:,.0f} thousand cycles.")


if __name__ == "__main__":
    main()

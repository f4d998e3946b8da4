"""Fused kernels, XLA and exact attention on a TPU, as its compiler counts them without a device.

Compiles for one v5e device, which need not be there, and measures no time. All rows are counted
alike: the bundles of the schedules of all operations and Pallas kernels, as often as they run, and
the bytes that they move to and from the device's memory, padding included, in cycles of 546 bytes
each. Bundles hold no wait for memory. The larger of the two is the estimate; that of a program that
waits for what it moves lies between it and their sum. XLA's estimates of its own operations stand
in the last column. They are another unit, two to five times the number of bundles for the batched
products of attention, and leave out kernels.

Run: python -m benchmarks.tpu_attention [LENGTH ...] (with the libtpu wheel, and JAX_PLATFORMS=cpu)
With --causal before the lengths it counts causal attention, whose tiles take the usual way
(``simrf_jax/_src/attention/pallas_tpu/weights.py`` says which that is).
With --band BANDWIDTH queries see the keys that are so near exactly, and with --packed those of
their own segment alone, in either.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

import simrf_jax
from benchmarks import command_line, exact_kernel, schedule, tpu
from simrf_jax import feature_maps
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_tpu.operands import band_of, lay_out, lay_out_near, shape_of

BATCH, HEADS, DIM = 8, 12, 64
LENGTHS = (197, 1024, 4096)
SPLASH_BLOCKS = (256, 512, 1024, 2048)  # Queries or keys of a block.
BYTES_PER_CYCLE = 546  # v5e: 819 GB/s and 1.5 GHz.
COLUMNS = (
    "bundles, forward",
    "bytes",
    "estimate",
    "bundles with backward",
    "bytes",
    "estimate",
    "XLA's own estimates",
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

    def with_copies(regions, counts):
        # XLA may keep the queries in the core's memory. The kernel first copies them tile by tile.
        return (*[queries] * (len(regions) - len(counts)), *counts)

    run = len(grids) if is_gradient else 1
    return programs * sum(
        schedule.bundles(
            name, steps, functools.partial(with_copies, counts=counts) if counts else ()
        )
        for name, (steps, counts) in zip(names[:run], grids[:run], strict=True)
    )


def in_order_bundles(sizes, kind, is_gradient):
    """Returns the bundles of the kernels that take tiles in order, of which no tile is rare."""
    tiles = sizes.key_tiles
    # A program begins, and each of its steps leaves out the rare way.
    names = ["", "_query_gradient", "_key_gradient"] if is_gradient else [""]
    return (BATCH * HEADS // sizes.num_heads) * sum(
        schedule.bundles(f"{kind}{which}", steps=tiles, counts=(1, 0, tiles), shortest=150)
        for which in names
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


def splash(length, blocks, *, is_causal):
    """Returns exact attention by JAX's splash attention, in blocks of some queries and keys."""
    padded = -length % max(blocks)
    of_queries, of_keys = blocks
    sizes = splash_attention_kernel.BlockSizes(
        block_q=of_queries,
        block_kv=of_keys,
        block_kv_compute=of_keys,
        block_q_dkv=of_queries,
        block_kv_dkv=of_keys,
        block_kv_dkv_compute=of_keys,
        block_q_dq=of_queries,
        block_kv_dq=of_keys,
    )
    kind = splash_attention_mask.CausalMask if is_causal else splash_attention_mask.FullMask
    sides = (length + padded, length + padded)
    mask = splash_attention_mask.MultiHeadMask([kind(sides)] * HEADS)
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes)
    ids = None
    if padded and not is_causal:
        of_tokens = jnp.arange(length + padded) < length
        ids = splash_attention_kernel.SegmentIds(of_tokens, jnp.ones_like(of_tokens))

    def attend(q, k, v):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * DIM**-0.5, k, v))
        q, k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, padded), (0, 0)]) for x in (q, k, v))
        out = jax.vmap(kernel, (0, 0, 0, None))(q, k, v, ids)
        return jnp.swapaxes(out[:, :, :length], 1, 2)

    return attend


def splash_bundles(length, blocks, *, is_causal, is_gradient):
    """Returns the bundles of splash attention's kernels that were compiled last."""
    queries, keys = (-(-length // block) for block in blocks)
    seen = queries * keys
    if is_causal:
        ends = (np.arange(queries) + 1) * blocks[0]
        seen = int(np.sum(np.minimum(keys, -(-ends // blocks[1]))))
    padding = -length % max(blocks)
    masked = "_segmented" if padding and not is_causal else ""

    def count(name, rows):
        def counts(regions):  # The largest takes a block that is seen; others begin or end a row.
            return [seen if size == max(regions) else rows for size in regions]

        return schedule.bundles(f"splash_mha_{name}_residuals", queries * keys, counts)

    if not is_gradient:
        return BATCH * HEADS * count(f"fwd{masked}_no", queries)
    both = count(f"fwd{masked}", queries) + count(f"dq{masked}_no", queries)
    return BATCH * HEADS * (both + count(f"dkv{masked}_no", keys))


class Count(NamedTuple):
    """Bundles, the bytes moved in cycles (None if unknown), and XLA's estimate."""

    bundles: int
    moved: float | None
    estimate: int


def measure(attend, length, *others, of_kernels=None, passes=(False, True)):
    """Returns a count for each pass: forward, and with backward.

    Args:
      attend: Function of queries, keys, values and others.
      length: Number of tokens.
      others: Further arguments, which are not known while compiling.
      of_kernels: Function of ``is_gradient`` that returns the bundles in Pallas kernels; None if
        there are none.
      passes: For each pass, whether it has the gradient.
    """
    counts = []
    for is_gradient in passes:
        schedule.forget()
        function, number = (both_ways(attend), 4) if is_gradient else (attend, 3)
        compiled = tpu.compile_for(function, *[tokens(length)] * number, *others)
        text = compiled.as_text()
        bundles = schedule.operation_bundles(tpu.executed(text))
        bundles += of_kernels(is_gradient=is_gradient) if of_kernels else 0
        moved = tpu.bytes_moved(text)
        moved = None if moved is None else moved / BYTES_PER_CYCLE
        counts.append(Count(bundles, moved, tpu.static_cycles(compiled)[0]))
    return counts


def best_splash(length, *, is_causal):
    """Returns a count for each pass of splash attention, in the blocks of the fewest bundles."""
    sizes = [size for size in SPLASH_BLOCKS if size <= max(length, min(SPLASH_BLOCKS))]
    best = []
    for is_gradient in (False, True):
        counts = []
        for blocks in itertools.product(sizes, repeat=2):
            count = functools.partial(splash_bundles, length, blocks, is_causal=is_causal)
            attend = splash(length, blocks, is_causal=is_causal)
            try:
                counts += measure(attend, length, of_kernels=count, passes=[is_gradient])
            except jax.errors.JaxRuntimeError:
                continue  # The blocks do not fit in the memory of a core.
        best.append(min(counts))
    return best


def rows(length, mode):
    """Yields the name of each attention, and its count for each pass."""
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
        yield name, measure(in_kernels, length, *others, of_kernels=count)
    by_xla = random_features("xla", mode)
    for num_features in (128, 130):
        others = (rows_of(num_features), positive, *segments)
        yield f"XLA, m = {num_features}", measure(by_xla, length, *others)
    if mode == Mode():
        yield "textbook, m = 130", measure(textbook, length, rows_of(130))
    exact = functools.partial(jax.nn.dot_product_attention, is_causal=mode.is_causal)
    yield "exact, jax.nn.dot_product_attention", measure(exact, length)
    yield "exact, splash attention", best_splash(length, is_causal=mode.is_causal)
    if mode == Mode() and length <= exact_kernel.LONGEST:

        def of_kernel(*, is_gradient):
            return BATCH * schedule.bundles(exact_kernel.NAME, steps=1)

        forward = measure(exact_kernel.attend, length, of_kernels=of_kernel, passes=[False])
        yield "exact, a plain kernel, forward alone", forward


def cells(counts):
    """Returns the cells of a row: bundles, bytes and the larger for each pass, and estimates."""
    found = []
    for bundles, moved, _ in counts:
        largest = None if moved is None else max(bundles, moved)
        found += ["" if x is None else f"{x / 1e3:,.1f}" for x in (bundles, moved, largest)]
    estimates = " / ".join(f"{count.estimate / 1e3:,.0f}" for count in counts)
    return [*found, *[""] * (6 - len(found)), estimates]


def main():
    """Prints a table for each length."""
    parser = command_line.parser(__doc__)
    parser.add_argument("lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--band", type=int, metavar="BANDWIDTH")
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    schedule.record()
    mode = Mode(options.causal, options.band, options.packed)
    for length in options.lengths:
        print(f"\n| T = {length}, thousands | {' | '.join(COLUMNS)} |\n|{' --- |' * 8}")
        for name, counts in command_line.bar(rows(length, mode), "rows"):
            command_line.show(f"| {name} | {' | '.join(cells(counts))} |")


if __name__ == "__main__":
    main()

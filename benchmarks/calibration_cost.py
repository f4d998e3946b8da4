"""Cost of attention with calibrated features, relative to positive features, and of calibrating.

The setting is 12 heads, d = 64 and 128 features: simplex rows for positive features, and for
calibrated ones rows of a cross-polytope, as an array or as 64 pairs (``Projection``), drawn
for each head or shared by all heads. The program prints the time of calibrated attention over that
of positive attention, round by round with quartiles, for the forward pass and for the forward and
backward pass (the gradient with respect to queries, keys and values), and for steps of decoding,
there also with a map that was folded before. With --tpu it compiles the same programs for a TPU of
that kind (pip install libtpu) and prints ratios of static cycles. It also times the calibration of
72 heads of 32, those of a small sentence encoder, on 10,000 tokens.

Run: python -m benchmarks.calibration_cost [--tpu v5e]
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import command_line
from experiments.harness import timing
from simrf_jax import RandomFeatureMechanism, feature_maps, random_feature_attention

HEADS, DIM, NUM_FEATURES = 12, 64, 128
CPU_LENGTHS = {197: 2, 1024: 1}  # Sequences in a batch, by length.
TPU_LENGTHS = {197: 8, 1024: 8}
DECODING_BATCHES = (1, 8, 64)
ROUNDS, STEPS = 60, 10  # Ten steps of decoding make one call, which takes milliseconds.


def tokens(batch, length, dtype=jnp.float32):
    """Returns queries, keys and values of different means and spectra."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, batch, length, HEADS, DIM))
    spectrum = jnp.arange(1, DIM + 1) ** -0.5
    return tuple(x.astype(dtype) for x in (q * spectrum + 0.2, k * spectrum[::-1] - 0.2, v))


def rows(coupling, shared):
    draw = functools.partial(simrf_jax.draw_projection, coupling=coupling)
    if shared:
        return draw(jax.random.key(1), NUM_FEATURES, DIM)
    keys = jax.random.split(jax.random.key(1), HEADS)
    return jax.vmap(lambda key: draw(key, NUM_FEATURES, DIM))(keys)


def mechanisms(shared):
    """Returns random features that are positive, and calibrated, by name."""
    q, k, _ = tokens(1, 1024)
    calibrated, one_of_each = simrf_jax.calibrate(q, k), rows("orthogonal", shared)[..., :DIM, :]
    return {
        "positive": RandomFeatureMechanism(rows("simplex", shared)),
        "calibrated": RandomFeatureMechanism(rows("cross_polytope", shared), calibrated),
        "pairs": RandomFeatureMechanism(
            simrf_jax.Projection(one_of_each, is_paired=True), calibrated
        ),
    }


def folded(mechanism):
    feature_map = feature_maps.Folded.of(mechanism.feature_map, mechanism.projection)
    return RandomFeatureMechanism(None, feature_map)


def attend(mechanism, q, k, v, *, is_causal):
    return random_feature_attention(
        q, k, v, mechanism.projection, feature_map=mechanism.feature_map, is_causal=is_causal
    )


def passes(is_causal):
    """Returns functions of a mechanism and tokens, by name."""
    forward = functools.partial(attend, is_causal=is_causal)

    def backward(mechanism, *tokens):
        def loss(*tokens):
            return jnp.sum(jnp.square(forward(mechanism, *tokens).astype(jnp.float32)))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*tokens)

    return {"forward": forward, "forward and backward": backward}


def settings(lengths, name):
    """Yields the settings of attention: causal or not, length, batch, and W shared or not."""
    cases = [*itertools.product((False, True), lengths.items(), (False, True))]
    for is_causal, (length, batch), shared in command_line.bar(cases, name):
        yield is_causal, length, batch, shared


def named(is_causal, length, shared):
    kind = "causal" if is_causal else "bidirectional"
    return f"{kind}, T = {length:,}, {'one W' if shared else 'a W for each head'}"


def ratios(times):
    """Returns a cell for each mechanism but the first, its time over that of positive features."""

    def cell(name):
        low, median, high = np.percentile(times[name] / times["positive"], [25, 50, 75])
        return f"{median:.2f} ({low:.2f} to {high:.2f})"

    return [cell(name) for name in times if name != "positive"]


def calls_of(function, shared, inputs):
    """Returns calls of a compiled function of a mechanism and tokens, by name."""
    program = jax.jit(function)

    def call(mechanism):
        return lambda _: program(mechanism, *inputs)

    return {name: call(mechanism) for name, mechanism in mechanisms(shared).items()}


def print_calibration(rounds):
    q, k = jax.random.normal(jax.random.key(0), (2, 10_000, 72, 32))
    times = timing.alternate({"calibrate": lambda _: simrf_jax.calibrate(q, k)}, rounds)
    timing.print_table(times)


def on_cpu(rounds):
    print("| attention | forward | pairs | forward and backward | pairs |\n" + "| --- " * 5 + "|")
    for is_causal, length, batch, shared in settings(CPU_LENGTHS, "settings"):
        inputs, cells = tokens(batch, length), []
        for function in passes(is_causal).values():
            calls = calls_of(function, shared, inputs)
            cells += ratios(timing.alternate(calls, rounds))
        command_line.show(f"| {named(is_causal, length, shared)} | {' | '.join(cells)} |")
    print("\n| decoding | calibrated | pairs | folded | folded pairs |\n" + "| --- " * 5 + "|")
    for batch in DECODING_BATCHES:
        cells = ratios(timing.alternate(decoding(batch), rounds))
        print(f"| batch {batch} | {' | '.join(cells)} |", flush=True)
    print("\nCalibrating 72 heads of 32 on 10,000 tokens:\n")
    print_calibration(rounds=5)


@functools.partial(jax.jit, donate_argnums=1)
def step(mechanism, state, *token):
    return mechanism.step(state, *token)


def decoding(batch):
    """Returns calls that take ``STEPS`` steps of decoding, by name, with a W for each head."""
    token, of_maps = tokens(batch, 1), mechanisms(shared=False)
    of_maps |= {f"folded {name}": folded(of_maps[name]) for name in ("calibrated", "pairs")}

    def repeated(mechanism):
        state = mechanism.init(batch=(batch,), num_key_heads=HEADS, head_dim=DIM, value_dim=DIM)

        def call(_):
            nonlocal state
            for _ in range(STEPS):
                out, state = step(mechanism, state, *token)
            return out

        return call

    return {name: repeated(mechanism) for name, mechanism in of_maps.items()}


def on_tpu(kind):
    from benchmarks import tpu

    def cycles(function, *arguments):
        shapes = jax.eval_shape(lambda *x: x, *arguments)
        return tpu.static_cycles(tpu.compile_for(function, *shapes, topology=f"{kind}:2x4"))[0]

    print("| attention, type | forward | pairs | forward and backward | pairs |")
    print("| --- " * 5 + "|")
    for dtype in (jnp.bfloat16, jnp.float32):
        for is_causal, length, batch, shared in settings(TPU_LENGTHS, dtype.dtype.name):
            inputs, cells = tokens(batch, length, dtype), []
            for function in passes(is_causal).values():
                positive, *others = (
                    cycles(function, mechanism, *inputs)
                    for mechanism in mechanisms(shared).values()
                )
                cells += [f"{other / positive:.2f} ({positive / 1e3:,.0f})" for other in others]
            name = f"{named(is_causal, length, shared)}, {dtype.dtype.name}"
            command_line.show(f"| {name} | {' | '.join(cells)} |")


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--tpu", metavar="KIND", help="count cycles of a TPU such as v5e")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    if arguments.tpu:
        on_tpu(arguments.tpu)
    else:
        on_cpu(arguments.rounds)


if __name__ == "__main__":
    main()

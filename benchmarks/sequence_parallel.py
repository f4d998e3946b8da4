"""Communication of attention over a sharded sequence axis, compiled for a TPU but not run.

The setting is one sequence of 65,536 tokens over the 8 devices of a v5e, with 8 heads of dimension
64 and 130 features. "banded" is the near field with bandwidth 32. The table shows the collectives
in the compiled program, the MiB that they bring to each device, and the memory that XLA allocates
in addition to inputs and outputs. The mesh axis is of type Explicit ("explicit"), or of type Auto
without ``sequence_axis`` ("auto").

Run: python -m benchmarks.sequence_parallel (with the libtpu wheel, and JAX_PLATFORMS empty)
"""

import itertools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from benchmarks import command_line, tpu
from simrf_jax import banded_attention, random_feature_attention

LENGTH, HEADS, DIM, FEATURES, BANDWIDTH = 65_536, 8, 64, 130, 32
MODES = ("bidirectional", "causal", "packed", "banded")
AXES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def compiled(mode, axis_type, backward):
    mesh = jax.make_mesh((8,), ("length",), (axis_type,), devices=tpu.devices("v5e:2x4"))

    def array(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P(*spec)))

    def attend(q, k, v, w, segment_ids):
        if mode == "banded":
            return banded_attention(q, k, v, bandwidth=BANDWIDTH)
        segment_ids = segment_ids if mode == "packed" else None
        is_causal = mode == "causal"
        return random_feature_attention(q, k, v, w, is_causal=is_causal, segment_ids=segment_ids)

    def loss(*arguments):
        return jnp.sum(jnp.square(attend(*arguments)))

    x = array((1, LENGTH, HEADS, DIM), None, "length")
    segment_ids = array((1, LENGTH), None, "length", dtype=jnp.int32)
    function = jax.grad(loss, argnums=(0, 1, 2)) if backward else attend
    return jax.jit(function).lower(x, x, x, array((FEATURES, DIM)), segment_ids).compile()


def main():
    command_line.parser(__doc__).parse_args()
    print("| axis, mode | pass | collectives | MiB that arrive | temporary MiB |")
    print("| --- | --- | --- | --- | --- |")
    cases = [*itertools.product(AXES, MODES, ("forward", "with backward"))]
    for axis, mode, passes in command_line.bar(cases, "compiled"):
        try:
            program = compiled(mode, AXES[axis], passes == "with backward")
        except jax.errors.JaxRuntimeError as error:  # An internal error of libtpu 0.0.52.
            reason = str(error).split(":")[0]
            command_line.show(f"| {axis}, {mode} | {passes} | does not compile: {reason} | | |")
            continue
        counts, total = tpu.collectives((line, 1) for line in program.as_text().splitlines())
        listed = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        command_line.show(
            f"| {axis}, {mode} | {passes} | {listed} | {total / 2**20:,.1f} | {memory:,.0f} |"
        )


if __name__ == "__main__":
    main()

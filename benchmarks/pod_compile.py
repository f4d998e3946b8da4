"""The whole training step of a ViT-B/16 at batch 4,096, compiled for TPU pods that are not there.

The step of experiments/vit (12 layers, 12 heads, 130 features, class token, dropout 0.1, bfloat16,
AdamW), data-parallel. "GiB" is what each device needs, arguments and temporary memory. Cycles are
the compiler's estimates for one device, loops as often as they run, and not measured; the
collectives are those in the program's text, where what is in a loop stands once.

Run: python -m benchmarks.pod_compile [v5e:16x16:none:scanned simplex,exact] (with the libtpu wheel,
and JAX_PLATFORMS empty)
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import sequence_parallel, tpu
from experiments.vit import sharding, train
from experiments.vit.configs import digits
from simrf_jax.models import ViT, ViTConfig

BATCH = 4096
# Pods, what is computed again so that the step fits, and how the layers are compiled.
PODS = (
    "v3:4x4:block:scanned",
    "v4:2x2x4:block:scanned",
    "v5e:16x16:none:scanned",
    "v5e:16x16:none:unrolled",
    "v6e:16x16:none:scanned",
)
# Couplings differ in how projections are drawn, which is not in the step.
ATTENTIONS = ("simplex", "exact")


def compiled(topology, remat, layers, attention):
    devices = tpu.topologies.get_topology_desc(topology, platform="tpu").devices
    mesh = sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 1, "sequence": 1}, devices)
    scan = layers == "scanned"
    config = ViTConfig.named("B/16", attention=attention, remat=remat, scan=scan)
    optimizer, _ = train.make_optimizer(digits.get_config())
    state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), config, optimizer))
    shardings = sharding.state_shardings(state, mesh)
    by_image = jax.NamedSharding(mesh, sharding.BATCH)
    batch = {
        "image": jax.ShapeDtypeStruct((BATCH, *config.image_size, config.channels), jnp.float32),
        "label": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    step = functools.partial(
        train.train_step,
        graphdef=nnx.graphdef(nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))),
        optimizer=optimizer,
        num_microbatches=1,
    )
    replicated = jax.NamedSharding(mesh, jax.P())
    jitted = jax.jit(
        step,
        in_shardings=(shardings, by_image),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )
    return jitted.lower(state, batch).compile()


def main():
    pods = sys.argv[1].split(",") if len(sys.argv) > 1 else PODS
    attentions = sys.argv[2].split(",") if len(sys.argv) > 2 else ATTENTIONS
    print("| pod, remat, layers | attention | GiB | million cycles | collectives | compiled in |")
    print("| --- | --- | --- | --- | --- | --- |")
    for pod in pods:
        topology, remat, layers = pod.rsplit(":", 2)
        for attention in attentions:
            start = time.perf_counter()
            program = compiled(topology, remat, layers, attention)
            seconds = time.perf_counter() - start
            memory = program.memory_analysis()
            size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            cycles, _ = tpu.static_cycles(program)
            counts, received = sequence_parallel.collectives(program)
            listed = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
            print(
                f"| {topology}, {remat}, {layers} | {attention} | {size / 2**30:.2f} "
                f"| {cycles / 1e6:.2f} | {listed}: {received / 2**20:.0f} MiB | {seconds:.0f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()

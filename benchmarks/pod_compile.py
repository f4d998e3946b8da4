"""The training step of the paper's ViT-B/16, compiled for TPU pods but not run.

Three programs are compiled for each pod. The first is the whole training step of experiments/vit at
batch 4,096, data-parallel, with random features (by XLA, and on chips that can do it in the fused
kernels) and with exact attention. The second is the redraw
of all projections, which is a separate program. The third is a product of two large matrices, which
shows what the compiler takes to be the peak of the chip. Each compiled program adds a line to a
file, and a program that has a line is not compiled again. At the end the tables are printed.

Run: python -m benchmarks.pod_compile pods.jsonl [v5e:16x16:none:scanned ...] (with the libtpu
wheel, and JAX_PLATFORMS empty)
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import command_line, flops, pods, tpu
from experiments.vit.configs import imagenet2012
from experiments.vit.metrics.flops import train_flops
from experiments.vit.training import sharding
from experiments.vit.training.train_step import build_program

PODS = (
    "v3:4x4:dots:scanned",
    "v4:2x2x4:dots:scanned",
    "v5e:16x16:none:scanned",
    "v6e:16x16:none:scanned",
    "v5e:16x16:none:unrolled",
    "v6e:16x16:none:unrolled",
)
CHANNELS, CLASSES = 3, 1000
SIDE = 8192  # Rows and columns of the matrices whose product should reach the peak.


def build(pod, attention):
    """Returns the paper's config for a pod, and the training program for all its devices."""
    config = imagenet2012.get_config()
    config.model.attention = attention.removesuffix(pods.IN_KERNELS)
    config.model.implementation = "pallas_tpu" if attention.endswith(pods.IN_KERNELS) else "xla"
    config.model.remat = pod.remat
    config.model.scan = pod.layers == "scanned"
    mesh = sharding.make_mesh(config.mesh, tpu.devices(pod.topology))
    return config, build_program(config, mesh, channels=CHANNELS, num_classes=CLASSES)


def trace_step(config, built):
    """Returns the training step, traced with an abstract batch."""
    sharded = jax.NamedSharding(built.mesh, sharding.BATCH)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((config.batch_size, *shape), dtype, sharding=sharded)

    side = config.image_size
    # Mixup makes labels soft.
    label = array(jnp.float32, CLASSES) if config.augment.mixup else array(jnp.int32)
    batch = {"image": array(jnp.float32, side, side, CHANNELS), "label": label}
    with jax.set_mesh(built.mesh):
        return built.train_step.trace(built.state, batch)


def step(pod, attention):
    """Returns the lowered training step and its FLOPs on all devices.

    ``flops`` includes what rematerialization computes again, ``model_flops`` does not.
    """
    config, built = build(pod, attention)
    traced = trace_step(config, built)
    # The trace of a kernel has the products of one step of its grid.
    whole = trace_step(*build(pod, attention.removesuffix(pods.IN_KERNELS)))
    counts = {
        "flops": flops.matmul_flops(whole.jaxpr, "tpu"),
        "model_flops": config.batch_size * train_flops(built.model),
    }
    return traced.lower(), counts


def redraw(pod, attention):
    """Returns the lowered redraw of all projections."""
    _, built = build(pod, attention)
    with jax.set_mesh(built.mesh):
        return built.redraw.lower(built.state), {}


def product(pod, _):
    """Returns a lowered matrix product that should reach the peak of one device, and its FLOPs."""
    one = jax.sharding.SingleDeviceSharding(tpu.devices(pod.topology)[0])
    matrix = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16, sharding=one)
    traced = jax.jit(jnp.matmul).trace(matrix, matrix)
    return traced.lower(), {"flops": flops.matmul_flops(traced.jaxpr)}


# The programs that are compiled for each pod, and the attentions that each is compiled for.
IN_KERNELS = tuple(coupling + pods.IN_KERNELS for coupling in ("simplex", "orthogonal"))
PROGRAMS = {
    product: ("",),
    step: ("simplex", "orthogonal", "exact", *IN_KERNELS),
    redraw: ("simplex", "orthogonal"),
}


def compile_and_read(lowered):
    """Compiles a program and returns its memory, estimated cycles and collectives."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes
    size += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    cycles, custom_calls = tpu.static_cycles(compiled)
    collectives, received = tpu.collectives(tpu.executed(compiled.as_text()))
    return {
        "bytes": size,
        "cycles": cycles,
        "custom_calls": custom_calls,
        "collectives": collectives,
        "received": received,
        "seconds": seconds,
    }


def bundles(pod, attention):
    """Returns the bundles of a step on one device, which another process compiles once more."""
    command = (sys.executable, "-m", "benchmarks.step_bundles", pod, attention)
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(found.stdout)


def rows_of(path, names):
    """Returns the rows of a file, after adding the rows that it lacks one by one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    parsed = {name: pods.Pod.parse(name) for name in names}
    programs = [
        (name, make, attention)
        for name, pod in parsed.items()
        for make, attentions in PROGRAMS.items()
        for attention in attentions
        if pod.chip.has_kernels or not attention.endswith(pods.IN_KERNELS)
    ]
    for name, make, attention in command_line.bar(programs, "compiled"):
        key = {"pod": name, "program": make.__name__, "attention": attention}
        if any(key.items() <= row.items() for row in rows):
            continue
        lowered, counts = make(parsed[name], attention)
        text = f"{parsed[name].topology}\n{lowered.as_text()}"
        key["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        # Couplings differ only in how projections are drawn, which is not part of the step, so
        # their steps are the same program.
        same = next((row for row in rows if row["sha256"] == key["sha256"]), None)
        if same is None:
            same = compile_and_read(lowered)
            if make is step and parsed[name].layers == "scanned":
                same["bundles"] = bundles(name, attention)
        rows.append(same | counts | key)
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    return rows


def main():
    """Compiles the programs that the file lacks, and prints the tables."""
    parser = command_line.parser(__doc__)
    parser.add_argument("file", type=pathlib.Path, help="JSON lines, one for each program")
    pod = "TOPOLOGY:REMAT:LAYERS"
    parser.add_argument("pods", nargs="*", default=PODS, metavar=pod, help="all unless given")
    options = parser.parse_args()
    rows = rows_of(options.file, options.pods)
    steps = imagenet2012.get_config().num_steps
    for table in (pods.step_table(rows), pods.redraw_table(rows), pods.hours_table(rows, steps)):
        print(table, end="\n\n")


if __name__ == "__main__":
    main()

"""Time and memory of attention by length: random features, exact, the textbook form, and peers.

The setting is 2 sequences of 4 heads, d = 64, m = 130 and float32 on JAX's default device. From
131,072 tokens on there is one sequence, and from 1,048,576 on one head, so that the arrays fit.
``attention_candidates`` has the candidates, and from which length on some are left out.

Each is timed for the forward pass, for the forward and backward pass (the gradient with respect to
queries, keys and values). The candidates of a length alternate in one process. Memory is what XLA
reserves for temporary buffers. ``benchmarks.decoding`` times steps of decoding.
The JSON holds quartiles of the times, quartiles of the ratios to ours taken round by
round, the machine and the versions. ``results/attention_cost.json`` is that of the README, and
``benchmarks.attention_cost_figure`` draws it. The tests marked ``timing`` measure some of its rows
again, and fail where they became worse; CONTRIBUTING.md has their command.

Run: python -m benchmarks.attention_cost [--lengths 128 1024] [--passes forward] [--output FILE]
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from benchmarks import attention_candidates, command_line
from experiments.harness import timing

BATCH, HEADS, DIM, NUM_FEATURES = 2, 4, 64, 130
LENGTHS = (128, 197, 256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536, 262_144, 1_048_576)
PASSES = ("forward", "backward", "causal_forward", "causal_backward")
LONGEST_BACKWARD = 65_536
IDENTITY = ("pass", "length", "candidate")  # The fields that name a row.
LEAST_RATIO, LARGEST_MEMORY = 0.7, 1.05  # Relative to earlier results, whose times are noisy.
PACKAGES = ("jax", "jaxlib", "numpy", "performer-pytorch", "tokamax", "torch")


def sizes(length):
    """Returns the number of sequences and of heads."""
    return 1 if length >= 131_072 else BATCH, 1 if length >= 1_048_576 else HEADS


def inputs(length):
    """Returns queries, keys, values and W."""
    batch, heads = sizes(length)
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = [jax.random.normal(key, (batch, length, heads, DIM)) for key in keys]
    return *tokens, simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM)


def with_backward(attend):
    def loss(tokens, w):
        return jnp.sum(jnp.square(attend(*tokens, w)))

    return lambda query, key, value, w: jax.value_and_grad(loss)((query, key, value), w)


def programs(name, length):
    """Returns functions of the inputs to compile, by candidate."""
    attends = attention_candidates.programs(length, is_causal=name.startswith("causal"))
    if name.endswith("forward"):
        return attends
    return {candidate: with_backward(attend) for candidate, attend in attends.items()}


def mib(size):
    return round(size / 2**20, 2)


def candidates(name, length):
    """Returns the calls of one pass at one length, and MiB of memory, by candidate."""
    arrays = inputs(length)
    calls, memory = {}, {}
    functions = programs(name, length)
    for candidate, function in command_line.bar(functions.items(), "compiled", len(functions)):
        program = jax.jit(function).lower(*arrays).compile()
        calls[candidate] = lambda _, program=program: program(*arrays)
        memory[candidate] = mib(program.memory_analysis().temp_size_in_bytes)
    if name in ("forward", "backward") and length <= attention_candidates.LONGEST_TEXTBOOK:
        peer = attention_candidates.performer_pytorch(arrays, is_gradient=name == "backward")
        calls |= {} if peer is None else {"performer_pytorch": peer}
    return calls, memory


def quartiles(x):
    return [float(f"{number:.4g}") for number in np.percentile(x, [25, 50, 75])]


def measure(name, length, *, rounds, seconds):
    """Yields one row for each candidate."""
    calls, memory = candidates(name, length)
    times = timing.alternate(calls, rounds, seconds=seconds)
    for candidate, ms in times.items():
        yield {
            "pass": name,
            "length": length,
            "sequences": sizes(length)[0],
            "heads": sizes(length)[1],
            "candidate": candidate,
            "milliseconds": quartiles(ms),
            "over_ours": quartiles(ms / times["ours"]),
            "temporary_mib": memory.get(candidate),
        }


def conditions():
    """Returns the machine, the device and the versions."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))]
    return {
        "machine": platform.platform(),
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: importlib.metadata.version(name) for name in installed},
    }


def regressions(before, after):
    """Returns a sentence for each row that became worse.

    Exact attention over ours is compared, which moves less from machine to machine than times do;
    and the temporary memory, which the compiler decides.

    Args:
      before: Rows of earlier results.
      after: New rows, of passes and lengths that the earlier results have.
    """
    sentences = []
    for row in after:
        (old,) = (x for x in before if all(x[field] == row[field] for field in IDENTITY))
        where = f"{row['pass']} at {row['length']} tokens"
        ratio, old_ratio = row["over_ours"][1], old["over_ours"][1]
        if row["candidate"] == "exact" and ratio < LEAST_RATIO * old_ratio:
            sentences.append(f"{where}: exact attention took {old_ratio} times ours, now {ratio}")
        memory, old_memory = row["temporary_mib"], old["temporary_mib"]
        if row["candidate"] == "ours" and memory > LARGEST_MEMORY * old_memory:
            sentences.append(f"{where}: ours took {old_memory} MiB, now {memory}")
    return sentences


def applies(name, length):
    return name in ("forward", "causal_forward") or length <= LONGEST_BACKWARD


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=30, help="for one pass at one length")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write")
    options = parser.parse_args()
    results = {"conditions": conditions(), "rows": []}
    for name in options.passes:
        for length in filter(functools.partial(applies, name), options.lengths):
            for row in measure(name, length, rounds=options.rounds, seconds=options.seconds):
                results["rows"].append(row)
                print(json.dumps(row), flush=True)
            if options.output:
                options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Time and memory of attention by length: random features, exact, the textbook form, and a peer.

The setting is 2 sequences of 4 heads, d = 64, m = 130 and float32 on JAX's default device. From
131,072 tokens on there is one sequence, and from 1,048,576 on one head, so that the arrays fit.
Candidates:

- ours: ``simrf_jax.random_feature_attention``, bidirectional or causal.
- exact: ``jax.nn.dot_product_attention``, up to 8,192 tokens.
- textbook: the form of the known implementations in JAX: all features in float32, one maximum over
  all keys and features, an epsilon. Bidirectional only.
- performer_pytorch: ``softmax_kernel`` and ``linear_attention`` of performer-pytorch, if it is
  installed (pip install performer-pytorch torch), on the CPU. Bidirectional only.

Each is timed for the forward pass, for the forward and backward pass (the gradient with respect to
queries, keys and values), and ours and exact for a step of decoding after so many tokens. The
candidates of a length alternate in one process. Memory is what XLA reserves for temporary buffers.
The JSON holds medians and quartiles of the times, quartiles of the ratios to ours taken round by
round, the machine and the versions.

Run: python -m benchmarks.cost [--lengths 128 1024] [--passes forward] [--output cost.json]
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
from benchmarks import command_line
from experiments.harness import timing
from simrf_jax import RandomFeatures

BATCH, HEADS, DIM, NUM_FEATURES = 2, 4, 64, 130
LENGTHS = (128, 197, 256, 1024, 4096, 8192, 65_536, 1_048_576)
PASSES = ("forward", "backward", "causal_forward", "causal_backward", "decoding")
LONGEST_EXACT, LONGEST_BACKWARD = 8192, 65_536
EPSILON = 1e-4
PACKAGES = ("jax", "jaxlib", "numpy", "performer-pytorch", "torch")


def sizes(length):
    """Returns the number of sequences and of heads."""
    return 1 if length >= 131_072 else BATCH, 1 if length >= 1_048_576 else HEADS


def inputs(length):
    """Returns queries, keys, values and W."""
    batch, heads = sizes(length)
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = [jax.random.normal(key, (batch, length, heads, DIM)) for key in keys]
    return *tokens, simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM)


def ours(query, key, value, w, *, is_causal=False):
    return simrf_jax.random_feature_attention(query, key, value, w, is_causal=is_causal)


def exact(query, key, value, w, *, is_causal=False):
    del w
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)


def textbook(query, key, value, w):
    def features(x, axes):
        x = x * DIM**-0.25
        logits = jnp.einsum("btnd,md->btnm", x, w)
        half_square = 0.5 * jnp.sum(jnp.square(x), axis=-1, keepdims=True)
        shift = jax.lax.stop_gradient(jnp.max(logits, axis=axes, keepdims=True))
        return NUM_FEATURES**-0.5 * (jnp.exp(logits - half_square - shift) + EPSILON)

    of_query, of_key = features(query, -1), features(key, (-3, -1))
    sums = jnp.einsum("bsnm,bsnd->bnmd", of_key, value)
    numerator = jnp.einsum("btnm,bnmd->btnd", of_query, sums)
    return numerator / jnp.einsum("btnm,bnm->btn", of_query, jnp.sum(of_key, axis=1))[..., None]


def with_backward(attend):
    def loss(tokens, w):
        return jnp.sum(jnp.square(attend(*tokens, w)))

    return lambda query, key, value, w: jax.value_and_grad(loss)((query, key, value), w)


def programs(name, length):
    """Returns functions of the inputs to compile, by candidate."""
    is_causal = name.startswith("causal")
    attends = {"ours": functools.partial(ours, is_causal=is_causal)}
    if length <= LONGEST_EXACT:
        attends["exact"] = functools.partial(exact, is_causal=is_causal)
    if not is_causal and length <= LONGEST_BACKWARD:
        attends["textbook"] = textbook
    if name.endswith("forward"):
        return attends
    return {candidate: with_backward(attend) for candidate, attend in attends.items()}


def performer_pytorch(name, arrays):
    """Returns a call of performer-pytorch, or None if it is not installed or does not apply."""
    if importlib.util.find_spec("performer_pytorch") is None or name not in ("forward", "backward"):
        return None
    import torch
    from performer_pytorch.performer_pytorch import linear_attention, softmax_kernel

    *tokens, w = (torch.from_numpy(np.array(x)) for x in arrays)
    tokens = [x.transpose(1, 2).contiguous() for x in tokens]

    def attend(query, key, value):
        of_query = softmax_kernel(query, projection_matrix=w, is_query=True)
        return linear_attention(
            of_query, softmax_kernel(key, projection_matrix=w, is_query=False), value
        )

    def forward(_):
        with torch.no_grad():
            attend(*tokens)

    def backward(_):
        leaves = [x.detach().requires_grad_() for x in tokens]
        attend(*leaves).square().sum().backward()

    return forward if name == "forward" else backward


def decoding(length):
    """Returns a step after ``length`` tokens for ours and exact, and the MiB of their memories."""
    *tokens, w = inputs(length)
    batch, heads = sizes(length)
    mechanism = RandomFeatures(w)
    empty = mechanism.init(batch=(batch,), num_key_heads=heads, head_dim=DIM, value_dim=DIM)
    state = jax.jit(RandomFeatures.append)(mechanism, empty, tokens[1], tokens[2])
    token = [x[:, -1:] for x in tokens]
    step, attend = jax.jit(RandomFeatures.step), jax.jit(jax.nn.dot_product_attention)
    calls = {
        "ours": lambda _: step(mechanism, state, *token),
        "exact": lambda _: attend(token[0], tokens[1], tokens[2]),
    }
    memory = {"ours": state, "exact": tokens[1:]}
    return calls, {
        name: mib(sum(x.nbytes for x in jax.tree.leaves(kept))) for name, kept in memory.items()
    }


def mib(size):
    return round(size / 2**20, 2)


def candidates(name, length):
    """Returns the calls of one pass at one length, and MiB of memory, by candidate."""
    if name == "decoding":
        return decoding(length)
    arrays = inputs(length)
    calls, memory = {}, {}
    for candidate, function in programs(name, length).items():
        program = jax.jit(function).lower(*arrays).compile()
        calls[candidate] = lambda _, program=program: program(*arrays)
        memory[candidate] = mib(program.memory_analysis().temp_size_in_bytes)
    peer = performer_pytorch(name, arrays) if length <= LONGEST_BACKWARD else None
    return calls | ({} if peer is None else {"performer_pytorch": peer}), memory


def quartiles(x):
    low, median, high = np.percentile(x, [25, 50, 75])
    return [float(f"{number:.4g}") for number in (median, low, high)]


def measure(name, length, *, rounds, seconds):
    """Yields one row for each candidate."""
    calls, memory = candidates(name, length)
    times = timing.alternate(calls, rounds, seconds=seconds)
    for candidate, ms in times.items():
        yield {
            "pass": name,
            "length": length,
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


def applies(name, length):
    return name in ("forward", "causal_forward", "decoding") or length <= LONGEST_BACKWARD


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=30, help="for one pass at one length")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write")
    options = parser.parse_args()
    rows = []
    for name in options.passes:
        for length in filter(functools.partial(applies, name), options.lengths):
            for row in measure(name, length, rounds=options.rounds, seconds=options.seconds):
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.output:
        options.output.write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

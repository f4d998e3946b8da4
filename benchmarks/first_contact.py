"""First contact with an accelerator: is attention right there, how fast is it, what does it take?

1. Checks: every way to attend, in float32 and bfloat16, by each implementation that the device has,
   against float64, with gradients; a NaN in a value reaches those that see it and nothing else.
2. Times and memory: forward and with backward, bidirectional and causal, beside the exact attention
   of the device (XLA, cuDNN on a GPU, splash attention on a TPU), in bfloat16.
3. A step of decoding by the number of tokens before.
4. A training step of a ViT, with random features and with exact attention.

After eight minutes (``--minutes``) no measurement begins. Rows are written as soon as they are
known, those of checks in groups of eight, and a second run with the same file goes on where the
first one ended, or was stopped. What fails becomes a row with the error. The last lines are the
tables of the file.

Run: python -m benchmarks.first_contact [--output first_contact.json] [--minutes 8] [--small]
"""

import functools
import itertools
import json
import os
import pathlib
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import simrf_jax
from benchmarks import attention_candidates, attention_cost, command_line, contact_checks, decoding
from experiments.harness import files, markdown, mistakes, timing
from simrf_jax.models import ViT, ViTConfig

DIM, NUM_FEATURES = 64, 128
SIZES = {
    # On a laptop's CPU: a rehearsal, whose times say little.
    "small": {
        "checked": (150,),
        "lengths": (197, 512),
        "tokens": 1024,
        "heads": 2,
        "before": (10, 1000),
        "model": "Ti/16",
        "image": 64,
        "batch": 4,
    },
    "whole": {
        "checked": (197, 1024),
        "lengths": (197, 1024, 4096, 16_384, 65_536),
        "tokens": 32_768,
        "heads": 12,
        "before": (10, 1000, 10_000),
        "model": "B/16",
        "image": 224,
        "batch": 64,
    },
}
SECONDS = 1.0  # For the timed calls of one row of candidates.
ROUNDS = 20
CHECKS = 8  # That run at once.


def implementations(backend, mode, dtype):
    """Returns the implementations to check; Pallas interprets the kernels for TPUs on a CPU."""
    if backend == "gpu" and dtype == "bfloat16":
        return "xla", "pallas_gpu"
    return ("xla", "pallas_tpu") if backend in ("cpu", "tpu") else ("xla",)


def pieces(size):
    """Yields (name, function without arguments that returns rows) of all measurements."""
    backend = jax.default_backend()
    cases = itertools.product(size["checked"], contact_checks.MODES, contact_checks.DTYPES)
    for length, mode, dtype in cases:
        for implementation in implementations(backend, mode, dtype):
            name = f"check, {length} tokens, {mode}, {dtype}, {implementation}"
            check = functools.partial(contact_checks.check, mode, implementation, dtype, length)
            yield name, lambda check=check: [check()]
    for length in size["lengths"]:
        yield f"times, {length} tokens", functools.partial(times, size, length)
    yield "decoding", functools.partial(decoding_steps, size)
    yield "training", functools.partial(training_steps, size)


def times(size, length):
    """Returns a row for each kind of call and candidate; what cannot be compiled has an error."""
    batch = max(1, min(8, size["tokens"] // length))
    shape = (batch, length, size["heads"], DIM)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    arrays.append(simrf_jax.draw_projection(jax.random.key(1), NUM_FEATURES, DIM))
    attends = {}
    for is_causal, backward in itertools.product((False, True), (False, True)):
        kind = "causal" if is_causal else "bidirectional"
        for name, attend in attention_candidates.programs(length, is_causal=is_causal).items():
            if backward:
                attends[f"{kind}, with backward", name] = attention_cost.with_backward(attend)
            else:
                attends[kind, name] = attend
    rows = {
        (kind, name): {"kind": kind, "candidate": name, "sequences": batch}
        for kind, name in attends
    }
    calls = {}
    found = together([functools.partial(compiled, x, arrays) for x in attends.values()])
    for place, (program, failure) in zip(attends, found, strict=True):
        if failure:
            rows[place]["failure"] = failure
            continue
        calls[place] = lambda _, program=program: program(*arrays)
        memory = attention_cost.mib(program.memory_analysis().temp_size_in_bytes)
        rows[place]["temporary_mib"] = memory
    for place, ms in timing.alternate(calls, ROUNDS, seconds=SECONDS * len(calls)).items():
        rows[place]["milliseconds"] = attention_cost.quartiles(ms)
    return list(rows.values())


def decoding_steps(size):
    """Returns a row for each number of tokens before a step of linear and of softmax attention."""
    calls, _ = decoding.candidates(8, size["heads"], size["before"])
    found = timing.alternate(calls, ROUNDS, seconds=SECONDS * len(calls))
    return [
        {
            "candidate": kind,
            "before": before,
            "milliseconds": attention_cost.quartiles(ms / decoding.STEPS),
        }
        for (kind, before), ms in found.items()
    ]


def training_steps(size):
    """Returns a row for a training step of a ViT with each attention."""
    side, calls = size["image"], {}
    images = jax.random.normal(jax.random.key(0), (size["batch"], side, side, 3), jnp.bfloat16)
    labels = jnp.arange(size["batch"])
    for attention in ("simplex", "exact"):
        config = ViTConfig.named(
            size["model"],
            image_size=(side, side),
            attention=attention,
            num_features=NUM_FEATURES,
            dtype="bfloat16",
            dropout_rate=0.0,
        )
        model = ViT(config, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
        step = functools.partial(train_step, model, optimizer, images, labels)
        calls[attention] = lambda _, step=step: step()
    found = timing.alternate(calls, ROUNDS, seconds=10 * SECONDS)
    return [
        {"candidate": name, "milliseconds": attention_cost.quartiles(ms)}
        for name, ms in found.items()
    ]


@nnx.jit
def train_step(model, optimizer, images, labels):
    """Takes a step, and returns the loss."""

    def loss(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def compiled(function, arrays):
    """Returns a program that has run once."""
    program = jax.jit(function).lower(*arrays).compile()
    jax.block_until_ready(program(*arrays))
    return program


def together(functions):
    """Returns what ``attempt`` returns of each function, which run in threads on an accelerator.

    Most of the eight minutes would go into compiling one program after another. On a CPU, programs
    that call back to Python, as interpreted kernels do, would wait for each other.
    """
    workers = 1 if jax.default_backend() == "cpu" else max(1, (os.cpu_count() or 1) // 2)
    with futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(attempt, functions))


def attempt(function):
    """Returns what a function returns, and None; or None, and the first line of its error."""
    try:
        return function(), None
    # On untested hardware any part may fail, and the rest is still worth measuring.
    except Exception as error:  # noqa: BLE001
        return None, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


def run(output, size, minutes):
    """Does what a file lacks, until the time is over.

    Args:
      output: JSON file, ``{"conditions": ..., "pieces": {name: rows}}``.
      size: One of ``SIZES``, which is part of the conditions.
      minutes: Time after which no piece begins.

    Returns:
      The content of the file.

    Raises:
      UserError: If the file cannot be written, or is damaged or of another machine.
    """
    begin = time.monotonic()
    # As JSON has it: lists in the place of tuples.
    conditions = json.loads(json.dumps(attention_cost.conditions() | {"size": size}))
    results = {"conditions": conditions, "pieces": {}}
    if output.exists():
        before = files.read_json(output)
        if before.get("conditions") != results["conditions"]:
            raise mistakes.UserError(
                f"{output} is of another machine, size or version; name another file."
            )
        results = before

    def save():  # Not by write_json, which refuses the NaN of a faulty kernel.
        with files.whole_file(output) as partial:
            partial.write_text(json.dumps(results, indent=1) + "\n")

    save()  # Fails before the first measurement if the file cannot be written.
    todo = [(name, piece) for name, piece in pieces(size) if name not in results["pieces"]]
    for group in command_line.bar(groups(todo), "groups of pieces", len(groups(todo))):
        if time.monotonic() - begin > 60 * minutes:
            name = group[0][0]
            command_line.show(f"The time is over before {name!r}; the same command goes on there.")
            break
        found = together([piece for _, piece in group])
        for (name, _), (rows, failure) in zip(group, found, strict=True):
            results["pieces"][name] = [{"failure": failure}] if failure else rows
            for row in results["pieces"][name]:
                if row.get("failure") or row.get("faults"):
                    command_line.show(f"{name}: {row.get('failure') or '; '.join(row['faults'])}")
        save()
    return results


def groups(todo):
    """Returns lists of pieces that may run at once: some checks, or one measurement of time."""
    checks = [x for x in todo if x[0].startswith("check")]
    measurements = [[x] for x in todo if not x[0].startswith("check")]
    return [checks[i : i + CHECKS] for i in range(0, len(checks), CHECKS)] + measurements


def tables(results):
    """Returns the Markdown tables of a file."""
    checks, measured = [], []
    for name, rows in results["pieces"].items():
        for row in rows:
            if name.startswith("check"):
                numbers = [f"{row[x]:.1e}" if x in row else "" for x in ("error", "gradient_error")]
                verdict = row.get("failure") or "; ".join(row["faults"]) or "right"
                checks.append([name.removeprefix("check, "), *numbers, verdict])
                continue
            what = name + (f", {row['kind']}" if "kind" in row else "")
            what += f", after {row['before']} tokens" if "before" in row else ""
            low, median, high = row.get("milliseconds", [np.nan] * 3)
            cell = row.get("failure") or f"{median:.4g} ({low:.4g} to {high:.4g})"
            memory = row.get("temporary_mib", "")
            measured.append([what, row.get("candidate", ""), cell, memory])
    device = results["conditions"]["device"]
    heads = (["check", "error", "error of gradients", "verdict"],)
    heads += (["measurement", "candidate", f"ms on {device} (quartiles)", "MiB of buffers"],)
    return "\n\n".join(map(markdown.table, heads, (checks, measured)))


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("first_contact.json"))
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--small", action="store_true", help="a rehearsal on a laptop's CPU")
    options = parser.parse_args()
    size = SIZES["small" if options.small else "whole"]
    with mistakes.exit_on_user_error():
        print(tables(run(options.output, size, options.minutes)))


if __name__ == "__main__":
    main()

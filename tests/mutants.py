"""Breaks the code in many places, one at a time, and says whether the default tests notice.

    python -m tests.mutants             # All of them.
    python -m tests.mutants causal      # Those whose path or text has a word.

Each mutant is a copy of the repository in which one line is wrong. Named beside it are the tests
of the default suite that are run on it until one fails. A mutant that survives ends the script with
status 1: then a test is missing, or the place is wrong.
"""

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
CORE = "simrf_jax/_src/attention/random_features"
KERNELS = "simrf_jax/_src/attention/pallas_tpu"
MODES = "tests/attention/test_every_mode.py"
OF_KERNELS = "tests/attention/test_kernels.py"
DEVICES = "tests/attention/test_sequence_parallel.py"
DATA, TRAINING = "experiments/vit/data", "experiments/vit/training"


class Mutant(NamedTuple):
    """A file, a text that occurs once in it, what takes its place, and the tests to run."""

    path: str
    text: str
    wrong: str
    tests: str


MUTANTS = [
    # Drawing W.
    Mutant(
        "simrf_jax/_src/projections/row_blocks.py",
        "(num_vertices**0.5 + 1) / n",
        "(num_vertices**0.5 - 1) / n",
        "tests/projections",
    ),
    Mutant(
        "simrf_jax/_src/projections/norms.py",
        "(place >= size / 2)",
        "(place > size / 2)",
        "tests/projections",
    ),
    Mutant(
        "simrf_jax/_src/projections/norms.py",
        "log_weights[-1] = math.log(of_zero_row)",
        "log_weights[0] = math.log(of_zero_row)",
        "tests/projections tests/test_conformance.py",
    ),
    Mutant(
        "simrf_jax/_src/projections/rotations.py",
        "x = jnp.triu(jax.random.normal(key, (n, dim), vectors.dtype))",
        "x = jnp.abs(jnp.triu(jax.random.normal(key, (n, dim), vectors.dtype)))",
        "tests/projections tests/test_conformance.py",
    ),
    Mutant(
        "simrf_jax/_src/projections/rotations.py",
        "(i // size < j // size)",
        "(i // size > j // size)",
        "tests/projections",
    ),
    Mutant(
        "simrf_jax/_src/projections/hadamard.py",
        "np.bitwise_count(index[:, None] & index) % 2",
        "np.bitwise_count(index[:, None] | index) % 2",
        "tests/projections",
    ),
    Mutant(
        "simrf_jax/_src/projections/redraw.py",
        "jax.random.fold_in(jax.random.fold_in(key, layer), number)",
        "jax.random.fold_in(key, layer + number)",
        "tests/projections",
    ),
    Mutant(
        "simrf_jax/_src/projections/redraw.py",
        "redraws = step // interval if interval else 0",
        "redraws = (step + 1) // interval if interval else 0",
        "tests/projections",
    ),
    Mutant(
        "simrf_jax/_src/projections/record.py",
        "jnp.broadcast_to(0.5 * log_weights, exponent.shape)",
        "jnp.broadcast_to(log_weights, exponent.shape)",
        "tests/projections tests/features",
    ),
    # Features and what is fitted.
    Mutant(
        "simrf_jax/_src/features/hybrid.py",
        'sign = -1 if side == "query" else 1',
        "sign = 1",
        "tests/features",
    ),
    Mutant(
        "simrf_jax/_src/features/trigonometric.py",
        "return np.pi * (0.25 + np.arange(num_features) / num_features)",
        "return np.pi * (0.25 + np.arange(num_features) / (2 * num_features))",
        "tests/features tests/theory",
    ),
    Mutant(
        "simrf_jax/_src/calibration/moments.py",
        "between = (self.num_vectors[:, None] * share)[..., None] * products",
        "between = share[..., None] * products",
        "tests/calibration",
    ),
    Mutant(
        "simrf_jax/_src/selection/trials.py",
        "variance += variance_of_ratio(of_queries, shares) / num_heads**2",
        "del shares",
        "tests/selection",
    ),
    Mutant(
        "simrf_jax/_src/calibration/fit.py",
        "return self.queries + self.keys + cross + cross.T",
        "return self.queries + self.keys + cross",
        "tests/calibration tests/integrations/test_calibrate.py",
    ),
    Mutant(
        "simrf_jax/_src/calibration/fit.py",
        "return 0.5 + 0.25 * (root + twice + 1)",
        "return 0.5 + 0.25 * (root + twice)",
        "tests/calibration",
    ),
    Mutant(
        "simrf_jax/_src/calibration/jacobi.py",
        "return columns / jnp.where(values > 0, values, 1), jnp.ldexp(values[0], exponent)",
        "return columns / jnp.where(values > 0, values, 1), values[0]",
        "tests/calibration",
    ),
    # Attention.
    Mutant(
        f"{CORE}/state.py",
        "8 * -(-length // (8 * count))",
        "8 * (length // (8 * count))",
        "tests/attention/test_causal.py",
    ),
    Mutant(
        f"{CORE}/state.py",
        "return AttentionState(self.in_units_of(maxima) + other.in_units_of(maxima), maxima)",
        "return AttentionState(self.sums + other.sums, maxima)",
        "tests/attention/decoding/test_far_field.py",
    ),
    Mutant(
        f"{CORE}/state.py",
        "own + other.sums * exp_in_units(other.shift, shift)",
        "own + other.sums",
        MODES,
    ),
    Mutant(
        "simrf_jax/_src/attention/estimator.py",
        "repeat_heads(jnp.asarray(x), groups, axis=0)",
        "jnp.concatenate([jnp.asarray(x)] * groups)",
        "tests/features/test_optimal_positive.py",
    ),
    Mutant(
        f"{CORE}/exact_band.py",
        "bandwidth >= max(lengths) - 1",
        "bandwidth >= max(lengths) - 2",
        "tests/attention/test_exact_band.py",
    ),
    Mutant(
        f"{CORE}/state.py",
        "beyond = [(0, 0, 0), (0, length - x.shape[1], 0)]",
        "beyond = [(0, 0, 0), (length - x.shape[1], 0, 0)]",
        "tests/attention/test_symbolic_lengths.py",
    ),
    Mutant(f"{CORE}/causal.py", "k=0 if self.with_own_key else -1", "k=0", MODES),
    Mutant(f"{CORE}/causal.py", "k=0 if self.with_own_key else -1", "k=1", MODES),
    Mutant(
        f"{CORE}/causal.py",
        "return Carry(self.state.where(is_same), self.poisoned & is_same[:, None], segment)",
        "return Carry(self.state, self.poisoned & is_same[:, None], segment)",
        MODES,
    ),
    Mutant(
        f"{CORE}/causal.py",
        "return Carry(self.state.where(is_same), self.poisoned & is_same[:, None], segment)",
        "return Carry(self.state.where(is_same), self.poisoned, segment)",
        MODES,
    ),
    Mutant(
        f"{CORE}/causal.py",
        "is_large = (largest(relative, axis=-1) > limit)[..., 0]",
        "is_large = (-largest(-relative, axis=-1) > limit)[..., 0]",
        f"{MODES} tests/attention/test_causal.py",
    ),
    Mutant(
        f"{CORE}/causal.py",
        "units = jnp.where(sees, units, -jnp.inf)",
        "units = jnp.where(sees | True, units, -jnp.inf)",
        f"{MODES} tests/attention/test_causal.py",
    ),
    Mutant(
        f"{CORE}/causal.py",
        "one_key_for_each_query(inputs, 1)",
        "one_key_for_each_query(inputs, 0)",
        MODES,
    ),
    Mutant(
        f"{CORE}/exact_band.py",
        "one_key_for_each_query(far, history + bandwidth)",
        "one_key_for_each_query(far, history + bandwidth + 1)",
        MODES,
    ),
    Mutant(
        f"{CORE}/exact_band.py",
        "end = history + bandwidth + length",
        "end = history + length",
        MODES,
    ),
    Mutant(
        f"{CORE}/xla.py",
        "_split(inputs.key_log_weights, rows, fill=-jnp.inf)",
        "_split(inputs.key_log_weights, rows, fill=0)",
        "tests/attention/test_bidirectional.py",
    ),
    Mutant(
        f"{CORE}/exact_keys.py",
        "sees = position <= own if is_causal",
        "sees = position >= own if is_causal",
        MODES,
    ),
    Mutant(
        f"{CORE}/exact_keys.py",
        "return jnp.where(is_hidden, -jnp.inf, masses)",
        "return masses",
        "tests/attention/test_exact_keys.py",
    ),
    Mutant(
        f"{CORE}/exact_keys.py",
        "if length == key_length:",
        "if length != key_length:",
        "tests/attention/test_exact_keys.py",
    ),
    *(
        Mutant(f"{CORE}/kept_keys.py", text, wrong, f"tests/attention/test_kept_keys.py {MODES}")
        for text, wrong in (
            (
                "& (num_better < count)",
                "& (num_better <= count)",
            ),
            ("leaves &= _same(", "leaves |= ~_same("),
            ("sees &= _same(", "sees |= ~_same("),
        )
    ),
    Mutant(
        "simrf_jax/_src/attention/banded/softmax.py",
        "band = (-bandwidth <= offset) & (offset <= (0 if is_causal else bandwidth))",
        "band = (-bandwidth < offset) & (offset <= (0 if is_causal else bandwidth))",
        MODES,
    ),
    Mutant(
        "simrf_jax/_src/attention/banded/softmax.py",
        "return band & same[:, :, None, None]",
        "return band",
        MODES,
    ),
    Mutant(
        "simrf_jax/_src/attention/banded/band.py",
        "unflatten(seen.part(slice(length, None)), batch)",
        "unflatten(seen.part(slice(0, bandwidth)), batch)",
        MODES,
    ),
    Mutant(
        "simrf_jax/_src/attention/inputs/masks.py",
        "return positions < to_int32(lengths)[..., None]",
        "return positions <= to_int32(lengths)[..., None]",
        "tests/attention/test_masks.py",
    ),
    Mutant(
        "simrf_jax/_src/attention/inputs/masks.py",
        "to_int32(lengths)[..., None].astype(positions.dtype)",
        "lengths[..., None].astype(positions.dtype)",
        "tests/attention/test_masks.py",
    ),
    Mutant(
        "simrf_jax/_src/integrations/flax_distillation.py",
        "call = jax.lax.stop_gradient(request.call)",
        "call = request.call",
        "tests/integrations/test_learned.py",
    ),
    Mutant(
        "simrf_jax/_src/attention/inputs/masks.py",
        "return jnp.cumsum(begins, axis=-1, dtype=jnp.int32)",
        "return segment_ids.astype(jnp.int32)",
        MODES,
    ),
    # Over devices.
    Mutant(f"{CORE}/exchange.py", "distance *= 2", "distance += step", DEVICES),
    Mutant(
        f"{CORE}/exchange.py",
        "return (source >= 0) & (source < jax.lax.axis_size(axes))",
        "return source < jax.lax.axis_size(axes)",
        DEVICES,
    ),
    Mutant(
        f"{CORE}/exchange.py",
        "state = self.state.where(~following.stops).merge(following.state)",
        "state = self.state.merge(following.state)",
        DEVICES,
    ),
    # The TPU kernels.
    Mutant(
        f"{KERNELS}/operands.py",
        "program(n).bytes_of(tile) <= memory()",
        "program(n).bytes_of(LANES) <= memory()",
        "tests/attention/test_pallas_tpu.py",
    ),
    Mutant(
        f"{KERNELS}/weights.py",
        "visible = of_keys <= of_queries",
        "visible = of_keys < of_queries",
        OF_KERNELS,
    ),
    Mutant(
        f"{KERNELS}/weights.py",
        "(differing >= half) & (differing < 2 * half) & reads",
        "(differing >= half) & reads",
        OF_KERNELS,
    ),
    Mutant(
        f"{KERNELS}/segments.py",
        "return self.of_queries == self.before",
        "return self.of_queries >= self.before",
        OF_KERNELS,
    ),
    Mutant(
        f"{KERNELS}/forward.py",
        "state.running[number] = state.running[number] * jnp.exp2(before - maxima) + more",
        "state.running[number] = state.running[number] + more",
        OF_KERNELS,
    ),
    # Flax.
    Mutant(
        "simrf_jax/_src/integrations/flax_masks.py",
        "product, segment_ids = queries & keys & causal, None",
        "product, segment_ids = queries & keys, None",
        "tests/integrations",
    ),
    Mutant(
        "simrf_jax/_src/integrations/flax_masks.py",
        "real = (ids != 0)[..., None, None, :]",
        "real = (ids >= 0)[..., None, None, :]",
        "tests/integrations",
    ),
    Mutant(
        "simrf_jax/_src/integrations/linearization/layer_choice.py",
        "if gain > 0 and cost <= left:",
        "if gain > 0:",
        "tests/integrations/test_linearize.py",
    ),
    Mutant(
        "simrf_jax/_src/integrations/linearization/kept_results.py",
        'f"{what} {structure}"',
        'f"{what[:5]} {structure}"',
        "tests/integrations/test_kept_results.py",
    ),
    Mutant(
        "simrf_jax/_src/attention/inspection/exact_pairs.py",
        "kept_pairs(ranks, self.num_kept, self.bandwidth + 1)",
        "kept_pairs(ranks, self.num_kept, self.bandwidth)",
        "tests/attention/test_exact_pairs.py",
    ),
    Mutant(
        "simrf_jax/_src/models/transformer.py",
        "return x + drop(self.mlp_out(hidden), 2)",
        "return x + drop(self.mlp_out(hidden), 1)",
        "tests/models",
    ),
    # Training.
    Mutant(
        f"{TRAINING}/checkpoint_contents.py",
        "[name for name in wanted if digests[name] != found.digests[name]]",
        "[name for name in wanted if name not in found.digests]",
        "tests/experiments/vit/training",
    ),
    Mutant(
        f"{TRAINING}/checkpoint_contents.py",
        'is_whole = isinstance(run, dict) and run.get("sha256") == sha256(run)',
        "is_whole = isinstance(run, dict)",
        "tests/experiments/vit/training",
    ),
    Mutant(
        f"{TRAINING}/train_step.py",
        "jax.random.fold_in(jax.random.fold_in(state.key, DROPOUT), state.step)",
        "jax.random.fold_in(state.key, DROPOUT)",
        "tests/experiments/vit/training/test_train_step.py",
    ),
    Mutant(
        f"{TRAINING}/train_step.py",
        '"loss": jnp.sum(losses * weight),',
        '"loss": jnp.sum(losses),',
        "tests/experiments/vit/training/test_train_step.py",
    ),
    Mutant(
        f"{DATA}/window_reader.py",
        "of_block = number - int(self._ends[block]) + stop - start",
        "of_block = number - int(self._ends[block]) + stop - start - 1",
        "tests/experiments/vit/data",
    ),
    Mutant(
        f"{DATA}/stream.py",
        "return make(number if number < first else number + missing)",
        "return make(number if number <= first else number + missing)",
        "tests/experiments/vit/data",
    ),
    Mutant(
        f"{DATA}/shuffle.py",
        "piece = max(begin, before) - before, min(end, ends[i]) - before",
        "piece = max(begin, before) - before, min(end, ends[i]) - before - 1",
        "tests/experiments/vit/data",
    ),
    # Theory.
    Mutant(
        "simrf_jax/_src/theory/mse.py",
        'log_gap if features == "positive" else 2 * log_gap - np.log(2)',
        'log_gap if features == "positive" else 2 * log_gap',
        "tests/theory",
    ),
    Mutant(
        "simrf_jax/_src/theory/limits.py",
        "return (1 - weight / dim * np.exp(-t) / special.exprel(-t) ** 2)[()]",
        "return (1 + weight / dim * np.exp(-t) / special.exprel(-t) ** 2)[()]",
        "tests/theory",
    ),
    Mutant(
        "simrf_jax/_src/theory/oscillating.py",
        "(half * weights * later).ravel()",
        "(half * weights).ravel()",
        "tests/theory/test_oscillating.py",
    ),
]


def is_caught(mutant: Mutant) -> bool:
    """Returns True if one of a mutant's tests fails."""
    text = (ROOT / mutant.path).read_text()
    assert text.count(mutant.text) == 1, f"{mutant.path} has not one {mutant.text!r}."
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv*", ".cache", "runs", "_build")
        shutil.copytree(ROOT, copy, ignore=ignored)
        (copy / mutant.path).write_text(text.replace(mutant.text, mutant.wrong))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *mutant.tests.split()]
        environment = os.environ | {
            "PYTHONPATH": str(copy),
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache/programs"),
        }
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    assert run.returncode in (0, 1), f"{mutant}: {run.stdout.decode()[-2000:]}"
    return run.returncode == 1


def main(words: list[str]) -> int:
    """Prints what becomes of each mutant, and returns the number of survivors."""
    chosen = [one for one in MUTANTS if not words or any(word in str(one) for word in words)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = []
        for mutant, is_dead in zip(chosen, pool.map(is_caught, chosen), strict=True):
            print("caught  " if is_dead else "SURVIVES", mutant.path, mutant.wrong, flush=True)
            caught.append(is_dead)
    print(f"{sum(caught)} of {len(caught)} mutants are caught.")
    return caught.count(False)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))

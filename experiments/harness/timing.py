"""Timing on a noisy machine: alternate the candidates in one process, quote medians and spread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import tqdm

LEAST_ROUNDS = 5


def alternate(
    candidates: Mapping[str, Callable[[int], Any]], rounds: int, *, seconds: float = math.inf
) -> dict[str, np.ndarray]:
    """Times each call, after one that compiles, in milliseconds: ``{name: array [rounds]}``.

    Each round begins with the next candidate, so that none always follows the same one. A bar on
    stderr counts the calls, and goes when they are done.

    Args:
      candidates: ``{name: call}``; a call takes the round's number and returns arrays.
      rounds: Number of times that each candidate is timed.
      seconds: Time after which no round begins, once there were ``LEAST_ROUNDS``.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    begin = time.perf_counter()
    with tqdm.tqdm(
        total=(rounds + 1) * len(names), desc="timed calls", dynamic_ncols=True, leave=False
    ) as progress:
        for round_ in range(rounds + 1):
            if round_ > LEAST_ROUNDS and time.perf_counter() - begin > seconds:
                break
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                start = time.perf_counter()
                jax.block_until_ready(candidates[name](round_))
                if round_:
                    times[name].append(1e3 * (time.perf_counter() - start))
                progress.update()
    return {name: np.array(ms) for name, ms in times.items()}


def print_table(times: Mapping[str, np.ndarray]) -> None:
    """Prints the median and quartiles of each candidate as a Markdown table."""
    print("| | median ms | quartiles |\n| --- | --- | --- |")
    for name, ms in times.items():
        low, median, high = np.percentile(ms, [25, 50, 75])
        print(f"| {name} | {median:.1f} | {low:.1f} to {high:.1f} |")

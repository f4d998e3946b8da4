"""Timing on a noisy machine: alternate the candidates in one process, quote medians and spread."""

import time

import jax
import numpy as np


def alternate(candidates, rounds):
    """Milliseconds of each call, after one that compiles: ``{name: array [rounds]}``.

    Args:
      candidates: ``{name: call}``; a call takes the round's number and returns arrays.
      rounds: How often each is timed.
    """
    times = {name: [] for name in candidates}
    for round_ in range(rounds + 1):
        for name, call in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(call(round_))
            if round_:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: np.array(ms) for name, ms in times.items()}


def print_table(times):
    """Median and quartiles of each as a Markdown table."""
    print("| | median ms | quartiles |\n| --- | --- | --- |")
    for name, ms in times.items():
        low, median, high = np.percentile(ms, [25, 50, 75])
        print(f"| {name} | {median:.1f} | {low:.1f} to {high:.1f} |")

"""Chip-hours and dollars of the paper's ViT runs, and hours and gigabytes to prepare their data.

The steps are those that were compiled for pods: chip-hours are read from the table in
docs/how_to/pod_costs.md, which benchmarks.pod_compile prints, for attention without the fused
kernels, which XLA does not estimate. All four data sets have images of as many tokens, so a step is
taken to cost what it does on ImageNet.

Nothing was run on a pod, so three costs of the same runs stand side by side: at 10% of the chips'
peak, at 45%, and by XLA's estimate of the step, which is no bound in either direction. Evaluations,
checkpoints, waits for images and idle slices come on top.

Run: python -m benchmarks.training_cost --price v5e=DOLLARS --price v6e=DOLLARS (a chip-hour)
"""

import argparse
import importlib
import pathlib
import re
from typing import NamedTuple

from benchmarks import pods
from experiments.harness import markdown

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "how_to" / "pod_costs.md"
RUNS = ("imagenet2012", "fashion_mnist_b", "inaturalist2021", "places365")
ATTENTIONS, SEEDS = ("simplex", "orthogonal", "exact"), 3
# Shares of the peak, which XLA's estimates of exact attention reach at most.
SHARES = (0.10, 0.45)


class Source(NamedTuple):
    """The download of a data set.

    Attributes:
      name: Name in TensorFlow Datasets.
      gigabytes: Sum of the sizes of its files, 10^9 bytes.
      images: Images of all splits, which are all prepared.
      origin: Source of the sizes.
    """

    name: str
    gigabytes: float
    images: int
    origin: str


# Test sets without labels are downloaded and prepared too, because their builders do so.
SOURCES = (
    Source("imagenet2012", 147.897 + 6.745, 1_281_167 + 50_000, "sizes of the two tar files"),
    Source("fashion_mnist", 0.031, 70_000, "checksums of TensorFlow Datasets"),
    Source(
        "i_naturalist2021",
        224 + 42 + 8.4 + 43,
        2_686_843 + 500_000 + 100_000 + 500_000,
        "github.com/visipedia/inat_comp/tree/master/2021",
    ),
    Source(
        "places365_small",
        0.067 + 26.104 + 4.737 + 0.525,
        1_803_460 + 328_500 + 36_500,
        "checksums of TensorFlow Datasets",
    ),
)


class Step(NamedTuple):
    """The compiled step of a pod.

    Attributes:
      pod: Name of the slice, ``remat`` and layers.
      attentions: Attentions that have this step.
      chips: Chips of the slice.
      at_low: Chip-hours of the steps on ImageNet at ``pods.UTILISATIONS[0]`` of the peak.
      estimated: The same by XLA's estimate.
    """

    pod: str
    attentions: tuple[str, ...]
    chips: int
    at_low: float
    estimated: float

    @property
    def chip(self):
        """Returns the name of the chip."""
        return self.pod.partition(":")[0]


def recorded_steps(text):
    """Returns the steps of the table of hours in a text.

    Raises:
      ValueError: If the text has no such table.
    """
    cells = ([c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines())
    steps = [
        Step(
            row[0],
            tuple(row[1].split(", ")),
            int(row[2]),
            float(row[5].split(", ")[0].replace(",", "")),
            float(row[-1].replace(",", "")),
        )
        for row in cells
        if len(row) == 8 and re.match(rf"({'|'.join(pods.CHIPS)}):\d", row[0])
    ]
    if not steps:
        raise ValueError("The text must have the table of hours that pod_compile prints.")
    return steps


def num_steps(name):
    """Returns the steps of a config."""
    return importlib.import_module(f"experiments.vit.configs.{name}").get_config().num_steps


def chip_hours(steps, pod, attention, name, share=None):
    """Returns the chip-hours of a run on a pod.

    Args:
      steps: Steps of ``recorded_steps``.
      pod: Name of the slice, ``remat`` and layers.
      attention: Attention of the run.
      name: Name of the config.
      share: Share of the peak that is reached; that of XLA's estimate by default.
    """
    of_pod = {a: step for step in steps if step.pod == pod for a in step.attentions}
    if attention not in of_pod:
        raise ValueError(f"The table of hours has no {attention} for {pod}.")
    step = of_pod[attention]
    of_step = step.estimated if share is None else step.at_low * pods.UTILISATIONS[0] / share
    return of_step * num_steps(name) / num_steps("imagenet2012")


def cost_table(steps, prices, runs):
    """Returns the table of what runs cost on each pod, the cheapest by XLA's estimate first.

    Args:
      steps: Steps of ``recorded_steps``.
      prices: Dollars of a chip-hour, by the name of the chip; pods without a price come last. There
        are no dollars in the table if it is empty.
      runs: Pairs of an attention and the name of a config.
    """
    units = ("chip-hours", "dollars") if prices else ("chip-hours",)
    header = ["pod, remat, layers", "chips"]
    for unit in units:
        header += [f"{unit} at {share:.0%} of peak" for share in SHARES]
        header.append(f"{unit} by XLA's estimate")
    header.append("hours, one run after the other")
    rows = []
    for pod in dict.fromkeys(step.pod for step in steps):
        first = next(step for step in steps if step.pod == pod)
        hours = [
            sum(chip_hours(steps, pod, *run, share) for run in runs) for share in (*SHARES, None)
        ]
        price = prices.get(first.chip)
        row = [pod, first.chips, *(f"{h:,.0f}" for h in hours)]
        if prices:
            row += [f"{h * price:,.0f}" if price else "-" for h in hours]
        row.append(f"{hours[-1] / first.chips:,.1f} to {hours[0] / first.chips:,.1f}")
        rows.append(((price is None, hours[-1] * (price or 1)), row))
    return markdown.table(header, [row for _, row in sorted(rows)])


def run_table(steps, pod):
    """Returns the table of chip-hours of each run on a pod."""
    rows = [
        (
            name,
            f"{num_steps(name):,}",
            *(f"{chip_hours(steps, pod, a, name):,.0f}" for a in ATTENTIONS),
        )
        for name in RUNS
    ]
    return markdown.table(("config", "steps", *ATTENTIONS), rows)


def preparation_table(*, megabytes_per_second, images_per_second):
    """Returns the table of gigabytes and hours to prepare each data set.

    Args:
      megabytes_per_second: Speed of the download.
      images_per_second: Images that one process of TensorFlow Datasets writes a second.
    """
    rows = []
    for source in SOURCES:
        download = source.gigabytes * 1e3 / megabytes_per_second / 3600
        write = source.images / images_per_second / 3600
        disk = f"{2 * source.gigabytes:,.1f}"
        cells = (f"{source.gigabytes:,.1f}", f"{download:.1f}", f"{write:.1f}", disk)
        rows.append((source.name, f"{source.images:,}", *cells, source.origin))
    header = ("data set", "images", "GB to download", "hours", "hours to write")
    header += ("GB of disk, at least", "sizes from")
    return markdown.table(header, rows)


def parse_price(text):
    """Returns the chip and the price of ``v5e=1.2``."""
    chip, _, dollars = text.partition("=")
    if chip not in pods.CHIPS or not re.fullmatch(r"\d+(\.\d+)?", dollars) or not float(dollars):
        raise argparse.ArgumentTypeError(
            f"must be CHIP=DOLLARS, the chip one of {', '.join(pods.CHIPS)}, got {text!r}."
        )
    return chip, float(dollars)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--price", type=parse_price, action="append", default=[], help="v5e=1.2, and so on.")
    add("--megabytes_per_second", type=float, default=50.0, help="Download (%(default)s).")
    add("--images_per_second", type=float, default=670.0, help="Writing (%(default)s).")
    given = parser.parse_args(argv)
    steps, prices = recorded_steps(PAGE.read_text()), dict(given.price)
    fig_9 = [(a, name) for a in ATTENTIONS for name in RUNS] * SEEDS
    print("One run:\n")
    print(cost_table(steps, prices, [("simplex", "imagenet2012")]), end="\n\n")
    print(f"All of Fig. 9, {len(fig_9)} runs:\n")
    print(cost_table(steps, prices, fig_9), end="\n\n")
    priced = [step for step in steps if not prices or step.chip in prices]
    wholes = {
        step.pod: sum(chip_hours(steps, step.pod, a, "imagenet2012") for a in ATTENTIONS)
        * prices.get(step.chip, 1)
        for step in priced
    }
    cheapest = min(wholes, key=wholes.get)
    fewest = "dollars" if prices else "chip-hours"
    print(f"Chip-hours by XLA's estimate on {cheapest}, of the fewest {fewest}:\n")
    print(run_table(steps, cheapest), end="\n\n")
    print(
        preparation_table(
            megabytes_per_second=given.megabytes_per_second,
            images_per_second=given.images_per_second,
        )
    )


if __name__ == "__main__":
    main()

"""TPU pods: their memory and peak, and estimates of training time on them."""

import math
import re
from typing import NamedTuple

from experiments.harness import markdown
from experiments.vit.metrics.flops import PEAK_FLOPS
from simrf_jax._src.models.config import REMATS

# A training run can be expected to reach a share of the peak between these two.
UTILISATIONS = (0.1, 0.2)
# Ends the name of an attention that is computed in the fused kernels, the default where they run.
IN_KERNELS = " in kernels"


class Chip(NamedTuple):
    """A TPU chip.

    Attributes:
      memory: GiB of HBM.
      kind: ``jax.Device.device_kind`` of its devices.
      devices: Number of devices that JAX sees on the chip.
      has_kernels: True if the fused kernels of attention compile for it.
    """

    memory: int
    kind: str
    devices: int = 1
    has_kernels: bool = True

    @property
    def peak(self):
        """Returns the peak number of bfloat16 operations per second."""
        return self.devices * PEAK_FLOPS[self.kind]


# "Key specifications" on cloud.google.com/tpu/docs/v3 and on the pages of the other chips. On v3
# each core is a device, with half of the memory and of the peak. The two cores of a v4 chip are one
# device.
CHIPS = {
    "v3": Chip(32, "TPU v3", devices=2, has_kernels=False),
    "v4": Chip(32, "TPU v4"),
    "v5e": Chip(16, "TPU v5e"),
    "v6e": Chip(32, "TPU v6e"),
}


class Pod(NamedTuple):
    """A slice of a pod, and how a ViT is compiled for it.

    Attributes:
      topology: Name of the slice in the TPU compiler, such as ``"v5e:16x16"``.
      remat: ``ViTConfig.remat``, which decides what is computed again so that the step fits.
      layers: ``"scanned"`` or ``"unrolled"``.
    """

    topology: str
    remat: str
    layers: str

    @classmethod
    def parse(cls, name):
        """Returns the pod that a name such as ``"v5e:16x16:none:scanned"`` describes.

        Raises:
          ValueError: If the name has another form.
        """
        pattern = rf"((?:{'|'.join(CHIPS)}):\d+(?:x\d+)+):({'|'.join(REMATS)}):(scanned|unrolled)"
        found = re.fullmatch(pattern, name)
        if not found:
            raise ValueError(
                f"A pod must be TOPOLOGY:REMAT:LAYERS, as in v5e:16x16:none:scanned, got {name!r}."
            )
        return cls(*found.groups())

    @property
    def chip(self):
        """Returns the chip that the pod is made of."""
        return CHIPS[self.topology.partition(":")[0]]

    @property
    def num_chips(self):
        """Returns the number of chips in the topology.

        Example:
          >>> Pod.parse("v4:2x2x4:dots:scanned").num_chips
          16
        """
        return math.prod(int(n) for n in self.topology.partition(":")[2].split("x"))

    @property
    def num_devices(self):
        """Returns the number of devices that JAX sees."""
        return self.num_chips * self.chip.devices


def hours(flops, *, chips, peak, utilization, steps):
    """Returns the hours that a training run takes.

    Args:
      flops: Operations of the model in one step, over all chips, without recomputation.
      chips: Number of chips.
      peak: Peak operations per second of one chip.
      utilization: Share of the peak that the model's own operations reach (MFU).
      steps: Number of training steps.

    Example:
      >>> hours(36e15, chips=10, peak=1e15, utilization=0.5, steps=1000)
      2.0
    """
    return steps * flops / (chips * peak * utilization) / 3600


def utilization(row, rows):
    """Returns the share of the peak that a step reaches by XLA's estimates.

    The peak is the rate that XLA estimates for a product of two large matrices, so that no clock
    rate is needed. The estimates hold waits for memory, and are no bound in either direction.

    Args:
      row: Row of a training step without kernels, which XLA does not estimate.
      rows: Rows of all programs, including the matrix product for the same pod.
    """
    pod = Pod.parse(row["pod"])
    [product] = _of(rows, "product", pod=row["pod"])
    flops_a_cycle = product["flops"] / product["cycles"]
    return row["model_flops"] / pod.num_devices / row["cycles"] / flops_a_cycle


def step_table(rows):
    """Returns the table of memory, operations, cycles and collectives of a step on each device.

    Bundles count kernels and all else alike, and hold no wait for memory. XLA's estimates leave
    kernels out, so that a step in kernels has no share of the peak.
    """
    header = ("pod, remat, layers", "attention", "GiB per device", "fits", "TFLOP")
    header += ("million bundles", "million cycles by XLA's estimate", "share of peak")
    header += ("collectives", "MiB", "compiled in")
    cells = []
    for row in _steps(rows):
        pod = Pod.parse(row["pod"])
        size, memory = row["bytes"] / 2**30, pod.chip.memory / pod.chip.devices
        bundles = row.get("bundles")
        collectives = ", ".join(f"{n} {name}" for name, n in sorted(row["collectives"].items()))
        cells.append(
            (
                ", ".join(pod),
                row["attention"],
                f"{size:.2f} of {memory:.0f}",
                "yes" if size < memory else "no",
                f"{row['flops'] / pod.num_devices / 1e12:.2f}",
                "" if bundles is None else f"{bundles / 1e6:.1f}",
                "" if _is_in_kernels(row) else f"{row['cycles'] / 1e6:.2f}",
                "" if _is_in_kernels(row) else f"{utilization(row, rows):.0%}",
                collectives,
                f"{row['received'] / 2**20:.0f}",
                f"{row['seconds']:.0f} s",
            )
        )
    return markdown.table(header, cells)


def redraw_table(rows):
    """Returns the table of redraws, alone and within a step, simplex against orthogonal."""
    header = ("pod, remat, layers", "simplex, million cycles", "orthogonal", "ratio")
    header += ("ratio of a step with a redraw", "compiled in")
    cells = []
    for simplex in _of(rows, "redraw", "simplex"):
        [orthogonal] = _of(rows, "redraw", "orthogonal", simplex["pod"])
        [step] = _of(rows, "step", "simplex", simplex["pod"])
        drawn, drawn_orthogonal = simplex["cycles"], orthogonal["cycles"]
        with_step = (step["cycles"] + drawn) / (step["cycles"] + drawn_orthogonal)
        cells.append(
            (
                ", ".join(Pod.parse(simplex["pod"])),
                f"{drawn / 1e6:.3f}",
                f"{drawn_orthogonal / 1e6:.3f}",
                f"{drawn / drawn_orthogonal:.4f}",
                f"{with_step:.5f}",
                f"{simplex['seconds']:.0f} s, {orthogonal['seconds']:.0f} s",
            )
        )
    return markdown.table(header, cells)


def hours_table(rows, steps):
    """Returns the table of hours that a training run takes.

    Hours are given at the shares of the peak in ``UTILISATIONS``, and by XLA's estimates. Steps in
    kernels are left out: they have the operations of the same step by XLA, and no estimate.

    Args:
      rows: Rows of all programs.
      steps: Number of training steps.
    """
    shares = [f"{share:.0%}" for share in UTILISATIONS]
    header = ("pod, remat, layers", "attention", "chips", "PFLOP a step")
    header += (f"hours at {', '.join(shares)}", "chip-hours")
    header += ("hours by XLA's estimate", "chip-hours")
    cells = []
    for row in _steps(rows):
        if _is_in_kernels(row):
            continue
        pod = Pod.parse(row["pod"])
        at = [
            hours(
                row["model_flops"],
                chips=pod.num_chips,
                peak=pod.chip.peak,
                utilization=share,
                steps=steps,
            )
            for share in (*UTILISATIONS, utilization(row, rows))
        ]
        *assumed, estimated = [(f"{h:,.1f}", f"{h * pod.num_chips:,.0f}") for h in at]
        listed = [", ".join(column) for column in zip(*assumed, strict=True)]
        model = f"{row['model_flops'] / 1e15:.3f}"
        cells.append((", ".join(pod), row["attention"], pod.num_chips, model, *listed, *estimated))
    return markdown.table(header, cells)


def _steps(rows):
    """Returns the rows of training steps, one row for all attentions with the same program."""
    shared = {}
    for row in _of(rows, "step"):
        first = shared.setdefault(row["sha256"], row | {"attention": []})
        first["attention"].append(row["attention"])
    return [row | {"attention": ", ".join(row["attention"])} for row in shared.values()]


def _is_in_kernels(row):
    return row["attention"].endswith(IN_KERNELS)


def _of(rows, program, attention=None, pod=None):
    return [
        row
        for row in rows
        if row["program"] == program
        and attention in (None, row["attention"])
        and pod in (None, row["pod"])
    ]

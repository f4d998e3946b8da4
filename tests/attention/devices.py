"""Attention over simulated devices, and what its compiled program says that they send."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tests import platforms

KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto, "manual": AxisType.Auto}
P = jax.P


def make_mesh(kind="explicit", **shape):
    number = int(np.prod(list(shape.values())))
    platforms.require_devices(number)
    devices = jax.devices()[:number]
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), (KINDS[kind],) * len(shape), devices=devices
    )


def sharded(attend, kind, mesh, spec, **options):
    """The call that users of each kind of axis make, for arrays of the spec on the mesh."""
    if kind == "explicit":
        return functools.partial(attend, **options)
    if kind == "auto":
        return functools.partial(attend, sequence_axis="length", **options)
    length = {"segment_ids": P(*spec[:-1], "length"), "mask": P(None, None, "length")}
    arrays = {name: jnp.asarray(x) for name, x in options.items() if name in length}
    rest = {name: x for name, x in options.items() if name not in arrays}

    def here(arrays, *qkv):
        return attend(*qkv, sequence_axis="length", **arrays, **rest)

    specs = ({name: length[name] for name in arrays}, spec, spec, spec)
    return functools.partial(jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=spec), arrays)


def collectives(compiled):
    """How often each collective comes with each shape; several of one shape at once count each."""
    found = collections.Counter()
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shapes, name in re.findall(rf"= (\S+|\(.*?\)) ({names})(?:-start)?\(", compiled.as_text()):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            found[name, dtype, tuple(int(n) for n in shape.split(",") if n)] += 1
    return found

"""Digests of arrays that do not depend on how the arrays are sharded.

The elements of an array are cut into 32-bit words. The digest is the sum of a hash of every word
with its position, modulo 2^32, in two lanes with hashes of their own (Bellare and Micciancio's
"AdHash" construction). The order of a sum does not matter, so each device adds up what it holds, at
the speed of its memory, and no element leaves it. The digest is the same after the array went to
another mesh or another number of devices or processes.

A digest of 64 bits is no protection from somebody who looks for two arrays with the same one. It
finds accidents:

- a change within one word is always found, because each lane's hash is a bijection of the word;
- any other change is missed with a probability of about 2^-64.

References:
  Bellare and Micciancio, A New Paradigm for Collision-Free Hashing: Incrementality at Reduced Cost
  (EUROCRYPT 1997). The mixing function is the finalizer of MurmurHash3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

_SALTS = (0x243F6A88, 0x85A308D3)  # The first digits of pi behind the point, one for each lane.


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """Returns the digest of each array in hexadecimal, ``{"params.head.kernel": "0b9a...", ...}``.

    The bits of the elements and their order count. The type and the shape do not, beyond that.

    Args:
      arrays: Arrays of numbers, booleans or keys. Where several processes share them, each process
        must call this function, with the arrays in the same order.
    """
    # One after the other: on CPUs, several programs that all wait for other processes may leave no
    # thread to the one that those wait for.
    sums = {name: jax.device_get(_digest(x)) for name, x in arrays.items()}
    return {name: "".join(f"{lane:08x}" for lane in lanes) for name, lanes in sums.items()}


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    """Returns the sums of both lanes, ``[2]``."""
    words = _words(x)
    positions = _positions(words.shape)
    lanes = tuple(_mix(words ^ _mix(positions ^ np.uint32(salt))) for salt in _SALTS)
    # XLA reads the array once for a reduction of several operands, and once for each of several
    # reductions.
    sums = jax.lax.reduce(
        lanes,
        (np.uint32(0),) * len(lanes),
        lambda one, other: tuple(a + b for a, b in zip(one, other, strict=True)),
        range(words.ndim),
    )
    return jnp.stack(sums)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of each element, as one or several words of 32 bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = 8 * min(x.dtype.itemsize, 4)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """Returns the number of each element in row-major order, modulo 2^32."""
    # Not a reshaped range, for which XLA would gather an array that is sharded.
    positions = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        positions += np.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return positions


def _mix(words: jax.Array) -> jax.Array:
    """Maps words to words one to one, so that each bit of the result depends on every bit."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)

"""The implementations of random-feature attention, and which of them takes a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

import jax
from jaxtyping import Array, Float

from simrf_jax import checks
from simrf_jax.attention.estimator import Estimator
from simrf_jax.attention.inputs.call import Call
from simrf_jax.attention.pallas_tpu import backend as pallas_tpu
from simrf_jax.attention.random_features import attention as xla

Implementation: TypeAlias = Literal["xla", "pallas_tpu"]
IMPLEMENTATIONS = get_args(Implementation)


@runtime_checkable
class Entry(Protocol):
    """A module that implements random-feature attention."""

    PLATFORM: str | None
    """JAX's name of the platform that it is preferred on, or None."""

    def reason_against(self, estimator: Estimator, call: Call, /, *, is_asked: bool) -> str | None:
        """Returns why it cannot take a call, or should not unless it is asked for; or None."""

    def attend(self, estimator: Estimator, call: Call, /) -> Float[Array, "*batch T N D"]:
        """Returns the attention of a call that it can take."""


# In the order in which they are tried. A new one is a module and a line here, and its name above.
ENTRIES: dict[str, Entry] = {"pallas_tpu": pallas_tpu, "xla": xla}


def names_of(asked: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the names of implementations that a caller asked for; None for no wish.

    Raises:
      ValueError: If one is unknown.
    """
    if asked is None:
        return None
    names = tuple(asked) if isinstance(asked, list | tuple) else (asked,)
    if not names:
        raise ValueError("implementation must be a name, several or None, got none.")
    for name in names:
        checks.one_of("implementation", name, (*IMPLEMENTATIONS, None))
    return names


def choose(asked: str | Sequence[str] | None, estimator: Estimator, call: Call) -> Entry:
    """Returns the first implementation that takes a call.

    Args:
      asked: A name, or several to try in order; None for those that are preferred on this platform.
      estimator: W, the feature map and options.
      call: The call.

    Raises:
      ValueError: If none of those asked for can take the call.
    """
    if asked is None:
        platform = jax.default_backend()
        names = [name for name, entry in ENTRIES.items() if platform == entry.PLATFORM]
        if not names:
            return xla
        names.append("xla")
    else:
        names = [asked] if isinstance(asked, str) else list(asked)
    reasons = {}
    for name in names:
        entry = ENTRIES[name]
        reason = entry.reason_against(estimator, call, is_asked=asked is not None)
        if reason is None:
            return entry
        reasons[name] = reason
    raise ValueError(
        "; ".join(
            f'implementation="{name}" cannot do this call: {reason}'
            for name, reason in reasons.items()
        )
        + "."
    )

"""The implementations of random-feature attention, and which of them takes a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

import jax
from jaxtyping import Array, Float

from simrf_jax._src import checks
from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_gpu import backend as pallas_gpu
from simrf_jax._src.attention.pallas_tpu import backend as pallas_tpu
from simrf_jax._src.attention.random_features import xla

Implementation: TypeAlias = Literal["xla", "pallas_tpu", "pallas_gpu"]
IMPLEMENTATIONS = get_args(Implementation)


@runtime_checkable
class Entry(Protocol):
    """A module that implements random-feature attention."""

    PLATFORM: str | None
    """JAX's name of the platform on which it is preferred, or None."""

    def reason_against(self, estimator: Estimator, call: Call, /, *, is_asked: bool) -> str | None:
        """Returns why this implementation cannot take a call, or None.

        If the caller did not name it, the reason may also be that another one is preferable.
        """

    def attend(self, estimator: Estimator, call: Call, /) -> Float[Array, "*batch T N D"]:
        """Returns the attention of a call that it can take."""


# They are tried in this order. To add one, write a module, add its line here and its name above,
# and document it in the docstrings of ``implementation``.
ENTRIES: dict[str, Entry] = {
    "pallas_tpu": pallas_tpu,
    "pallas_gpu": pallas_gpu,
    "xla": xla,
}


def names_of(asked: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the implementations that a caller asks for.

    Raises:
      ValueError: If one is unknown, or a sequence is empty.
    """
    if not isinstance(asked, list | tuple):
        checks.one_of("implementation", asked, (*IMPLEMENTATIONS, None))
        return (str(asked),)
    if not asked:
        raise ValueError("implementation must be a name, several or None, got none.")
    for name in asked:
        checks.one_of("Each implementation", name, IMPLEMENTATIONS)
    return tuple(asked)


def choose(estimator: Estimator, call: Call) -> Entry:
    """Returns the first implementation that takes a call.

    Args:
      estimator: W, the feature map and options. Its ``implementation`` is the names to try in
        order; None for those preferred on this platform.
      call: The call.

    Raises:
      ValueError: If none of those asked for can take the call.
    """
    asked = estimator.implementation
    if asked is None:
        platform = jax.default_backend()
        names = [name for name, entry in ENTRIES.items() if platform == entry.PLATFORM]
        if not names:
            return xla
        names.append("xla")
    else:
        names = list(asked)
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

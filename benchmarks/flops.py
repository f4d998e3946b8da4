"""Floating-point operations of the matrix products of a traced function.

XLA's own count (`cost_analysis`) counts the body of a loop once, however often it runs. This module
reads the trace, where a scan has a known length. It counts matrix products only, two operations for
each multiplication, as is usual for the FLOPs of a model.
"""

import math

from jax.extend import core


def matmul_flops(jaxpr, platform=None):
    """Returns the number of operations of all matrix products, over all devices.

    Args:
      jaxpr: A jaxpr, such as `jax.jit(f).trace(...).jaxpr`. Where a function has several branches,
        the most expensive one counts.
      platform: Platform such as "tpu" or "cuda", whose branch counts where platforms have their
        own; None counts the most expensive one there, too.

    Raises:
      ValueError: If a loop of unknown length contains matrix products, or there is a convolution.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> traced = jax.jit(jnp.matmul).trace(jnp.ones((2, 3)), jnp.ones((3, 5)))
      >>> matmul_flops(traced.jaxpr)
      60
    """
    return sum(_flops(equation, platform) for equation in jaxpr.eqns)


def _flops(equation, platform):
    name = equation.primitive.name
    if name == "dot_general":
        left = equation.invars[0].aval.shape
        (contracted, _), _ = equation.params["dimension_numbers"]
        size = math.prod(left[axis] for axis in contracted)
        return 2 * size * math.prod(equation.outvars[0].aval.shape)
    jaxprs = core.jaxprs_in_params(equation.params)
    inner = [matmul_flops(jaxpr, platform) for jaxpr in jaxprs]
    if name == "conv_general_dilated" or (name == "while" and any(inner)):
        raise ValueError(f"Operations of {name} are not counted.")
    if name == "cond":
        return _of_branch(inner, equation.params.get("branches_platforms"), platform)
    return equation.params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)


def _of_branch(flops, platforms, platform):
    """Returns the operations of the branch of a platform, or of the most expensive one.

    Args:
      flops: Operations of each branch.
      platforms: Names of the platforms of each branch, None for that of all others; or None, if
        something else decides.
      platform: Name of the platform, or None.
    """
    if platform is None or platforms is None:
        return max(flops)
    named = {name: n for n, names in zip(flops, platforms, strict=True) for name in names or [None]}
    if platform not in named and None not in named:
        raise ValueError(f"No branch is for {platform}, only for {', '.join(named)}.")
    return named[platform] if platform in named else named[None]

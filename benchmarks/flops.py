"""Floating-point operations of the matrix products of a traced function.

XLA's own count (`cost_analysis`) counts the body of a loop once, however often it runs. This module
reads the trace, where a scan has a known length. It counts matrix products only, two operations for
each multiplication, as is usual for the FLOPs of a model.
"""

import math

from jax.extend import core


def matmul_flops(jaxpr):
    """Returns the number of operations of all matrix products, over all devices.

    Args:
      jaxpr: A jaxpr, such as `jax.jit(f).trace(...).jaxpr`. Where a function has several branches,
        such as one for each platform, the most expensive branch counts.

    Raises:
      ValueError: If a loop of unknown length contains matrix products, or there is a convolution.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> traced = jax.jit(jnp.matmul).trace(jnp.ones((2, 3)), jnp.ones((3, 5)))
      >>> matmul_flops(traced.jaxpr)
      60
    """
    return sum(_flops(equation) for equation in jaxpr.eqns)


def _flops(equation):
    name = equation.primitive.name
    if name == "dot_general":
        left = equation.invars[0].aval.shape
        (contracted, _), _ = equation.params["dimension_numbers"]
        size = math.prod(left[axis] for axis in contracted)
        return 2 * size * math.prod(equation.outvars[0].aval.shape)
    inner = [matmul_flops(jaxpr) for jaxpr in core.jaxprs_in_params(equation.params)]
    if name == "conv_general_dilated" or (name == "while" and any(inner)):
        raise ValueError(f"Operations of {name} are not counted.")
    if name == "cond":
        return max(inner)
    return equation.params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)

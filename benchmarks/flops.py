"""Floating-point operations of the matrix products of a traced function.

XLA's own count (`cost_analysis`) takes what is in a loop once, as if the loop went round once.
This one reads the trace, where a scan says how long it is, and counts matrix products alone, two
operations for each multiplication, as is the custom for a model's FLOPs.
"""

import math

from jax.extend import core


def matmul_flops(jaxpr):
    """Operations of the matrix products, over all devices.

    Args:
      jaxpr: Of `jax.jit(f).trace(...).jaxpr`. Where a function has several forms, one for each
        platform, the dearest counts.

    Raises:
      ValueError: If there are products in a loop without a known end, or convolutions.

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

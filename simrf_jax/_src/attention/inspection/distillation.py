"""The loss that fits feature maps to softmax attention: cross-entropy of the attention weights."""

from __future__ import annotations

from typing import SupportsIndex, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from simrf_jax._src.attention.estimator import Estimator, ExactKeysLike, compiled
from simrf_jax._src.attention.inputs.call import Call, Options
from simrf_jax._src.attention.inspection.all_pairs import log_kernels
from simrf_jax._src.attention.random_feature_attention import RandomFeatureMechanism
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.projections import ProjectionLike


def distillation_loss(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    projection: ProjectionLike | None,
    *,
    feature_map: FeatureMapLike,
    exact_bandwidth: SupportsIndex | None = None,
    exact_keys: ExactKeysLike | None = None,
    **options: Unpack[Options],
) -> Float[Array, ""]:
    r"""Returns the cross-entropy between softmax attention weights and those of features.

    .. math::
        L = -\frac1T \sum_t \sum_s A_{ts} \log \hat A_{ts}, \qquad
        A_{ts} = \frac{e^{q_t \cdot k_s}}{\sum_r e^{q_t \cdot k_r}}, \qquad
        \hat A_{ts} = \frac{\phi(q_t)^\top \phi(k_s)}{\sum_r \phi(q_t)^\top \phi(k_r)}

    with queries and keys scaled as by ``random_feature_attention``, and the mean over all heads and
    sequences. The softmax weights are the target and have no gradient. The loss is smallest when
    both sets of weights are equal; it then is the mean entropy of the softmax weights. It is
    computed in log space: small weights do not underflow, and have gradients. Time is O(T S
    num_features), and memory is O(S (T + num_features)), even with gradients.

    Minimize it over the arrays of ``feature_maps.Learned`` to learn a feature map for the queries
    and keys of a trained model. Pass the bandwidth with which the map is used: without a band the
    loss does not determine one factor of each query, which matters next to an exact band.

    Args:
      query: ``[..., T, N, H]``.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      projection: W, ``[num_features, H]`` or ``[K, num_features, H]``; None for a map that needs
        none.
      feature_map: A name, an object of ``simrf_jax.feature_maps``, or a function, whose features
        are positive.
      exact_bandwidth: None, or a distance; keys that are no farther from a query have exact
        weights, as in ``random_feature_attention``.
      exact_keys: None, a number of keys or their positions; these keys have exact weights too, as
        in ``random_feature_attention``.
      **options: ``mask``, ``bias``, ``scale``, ``is_causal``, ``query_seq_lengths``,
        ``key_value_seq_lengths`` and ``segment_ids``, as in ``random_feature_attention``; queries
        beyond their lengths do not count.

    Returns:
      One number in float32 at least: the mean over the queries that see a key, 0 if there is none.
      It is infinite if a visible key has no feature in common with a query, and NaN if a query or
      key that counts is not finite.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not match, a name is unknown, the scale is not finite, features may
        be negative, the mask or the bias may differ between queries, explicit mesh axes shard the
        length, or the feature map cannot be used with an exact band.

    Example:
      >>> import jax, simrf_jax
      >>> q, k = jax.random.normal(jax.random.key(0), (2, 10, 2, 16)) / 2
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 128, 16)
      >>> loss = simrf_jax.distillation_loss(q, k, w, feature_map="positive")
      >>> weights = jax.nn.softmax(jax.numpy.einsum("tnh,snh->nts", q, k) / 4)
      >>> entropy = -(weights * jax.numpy.log(weights)).sum(-1).mean()
      >>> bool(entropy < loss < entropy + 0.2)
      True

    References:
      Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry
      (ICLR 2024), https://arxiv.org/abs/2402.04347
    """
    mechanism = RandomFeatureMechanism(
        projection, feature_map, exact_bandwidth=exact_bandwidth, exact_keys=exact_keys
    )
    call = Call.of(query, key, key, **options)
    return compiled(loss_of, mechanism.feature_map)(mechanism, call)


def loss_of(
    estimator: Estimator, call: Call, counts: Bool[Array, "*#batch #N T"] | None = None
) -> Float[Array, ""]:
    """Returns the ``distillation_loss`` of a call, over the queries where ``counts`` is True.

    The call's ``value`` is not read.
    """
    estimated, exact, *_ = log_kernels(estimator, call)
    return mean_cross_entropy(estimated, jax.lax.stop_gradient(exact), counts)


def mean_cross_entropy(
    estimated: Float[Array, "*batch N T S"],
    exact: Float[Array, "*batch N T S"],
    counts: Bool[Array, "*#batch #N T"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean over rows that are not all minus infinity; both hide the same keys.

    Args:
      estimated: Logarithms of the estimated kernel.
      exact: Logarithms of the softmax kernel.
      counts: False at rows to leave out; None to count all.
    """
    visible = exact != -jnp.inf
    if counts is not None:
        visible &= counts[..., None]
    sees = jnp.any(visible, axis=-1)
    # A row of minus infinities has no softmax.
    weights = jax.nn.softmax(jnp.where(sees[..., None], exact, 0), axis=-1)
    # Nor has one without features, whose loss is infinite like that of a key without them.
    without = estimated == -jnp.inf
    some = sees & ~jnp.all(without, axis=-1)
    logs = jax.nn.log_softmax(jnp.where(some[..., None], estimated, 0), axis=-1)
    logs = weights * jnp.where(visible & ~without, logs, 0)
    terms = jnp.where(visible, jnp.where(without, -jnp.inf, logs), 0)
    return -jnp.sum(terms) / jnp.maximum(jnp.sum(sees), 1).astype(terms.dtype)

"""Bidirectional and causal attention that ``benchmarks.attention_cost`` compares.

- ours: ``simrf_jax.random_feature_attention``.
- xla, pallas_gpu: ours by XLA and in the fused kernels, on a GPU.
- exact: ``jax.nn.dot_product_attention``.
- tokamax: exact attention by ``tokamax.dot_product_attention``, if it is installed.
- cudnn: exact attention by cuDNN, on a GPU, for half-precision arrays.
- splash: exact attention by the splash attention of ``jax.experimental.pallas``, on a TPU.
- textbook: the form of the known implementations in JAX: all features in float32, one maximum over
  all keys and features, an epsilon. Bidirectional only.
- performer_pytorch: ``softmax_kernel`` and ``linear_attention`` of performer-pytorch, if it is
  installed (pip install performer-pytorch torch), on the CPU. Bidirectional only.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax

LONGEST_EXACT, LONGEST_TEXTBOOK = 8192, 65_536
EPSILON = 1e-4
SPLASH_BLOCK = 512  # Queries and keys of a block.


def ours(query, key, value, w, *, is_causal=False):
    return simrf_jax.random_feature_attention(query, key, value, w, is_causal=is_causal)


def pallas_gpu(query, key, value, w, *, is_causal=False):
    return simrf_jax.random_feature_attention(
        query, key, value, w, is_causal=is_causal, implementation="pallas_gpu"
    )


def xla(query, key, value, w, *, is_causal=False):
    return simrf_jax.random_feature_attention(
        query, key, value, w, is_causal=is_causal, implementation="xla"
    )


def exact(query, key, value, w, *, is_causal=False):
    del w
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)


def tokamax(query, key, value, w, *, is_causal=False):
    import tokamax

    del w
    return tokamax.dot_product_attention(query, key, value, is_causal=is_causal)


def cudnn(query, key, value, w, *, is_causal=False):
    del w
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="cudnn"
    )


def splash(query, key, value, w, *, is_causal=False):
    from jax.experimental.pallas.ops.tpu import splash_attention as package

    del w
    *_, length, num_heads, dim = query.shape
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes = package.BlockSizes(**{f"block_{name}": SPLASH_BLOCK for name in names})
    kind = package.CausalMask if is_causal else package.FullMask
    mask = package.MultiHeadMask([kind((length, length))] * num_heads)
    kernel = package.make_splash_mha_single_device(mask, block_sizes=sizes)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query * dim**-0.5, key, value))
    return jnp.swapaxes(jax.vmap(kernel)(query, key, value), 1, 2)


def textbook(query, key, value, w):
    num_features, dim = w.shape[-2:]

    def features(x, axes):
        x = x.astype(jnp.float32) * dim**-0.25
        logits = jnp.einsum("btnd,md->btnm" if w.ndim == 2 else "btnd,nmd->btnm", x, w)
        half_square = 0.5 * jnp.sum(jnp.square(x), axis=-1, keepdims=True)
        shift = jax.lax.stop_gradient(jnp.max(logits, axis=axes, keepdims=True))
        return num_features**-0.5 * (jnp.exp(logits - half_square - shift) + EPSILON)

    of_query, of_key = features(query, -1), features(key, (-3, -1))
    sums = jnp.einsum("bsnm,bsnd->bnmd", of_key, value.astype(jnp.float32))
    numerator = jnp.einsum("btnm,bnmd->btnd", of_query, sums)
    denominator = jnp.einsum("btnm,bnm->btn", of_query, jnp.sum(of_key, axis=1))
    return (numerator / denominator[..., None]).astype(query.dtype)


def programs(length, *, is_causal):
    """Returns functions of queries, keys, values and W to compile, by candidate."""
    attends = {"ours": ours}
    if length <= LONGEST_EXACT:
        attends["exact"] = exact
        if importlib.util.find_spec("tokamax"):
            attends["tokamax"] = tokamax
    if jax.default_backend() == "gpu":
        attends["cudnn"] = cudnn
        # The one that is not the default.
        attends |= {"pallas_gpu": pallas_gpu} if is_causal else {"xla": xla}
    if length % SPLASH_BLOCK == 0 and jax.default_backend() == "tpu":
        attends["splash"] = splash
    if is_causal:
        return {name: functools.partial(f, is_causal=True) for name, f in attends.items()}
    return attends | ({"textbook": textbook} if length <= LONGEST_TEXTBOOK else {})


def performer_pytorch(arrays, *, is_gradient):
    """Returns a call of performer-pytorch, or None where it is not installed or not comparable."""
    has_package = importlib.util.find_spec("performer_pytorch") is not None
    if not has_package or jax.default_backend() != "cpu":
        return None
    import torch
    from performer_pytorch.performer_pytorch import linear_attention, softmax_kernel

    *tokens, w = (torch.from_numpy(np.array(x)) for x in arrays)
    tokens = [x.transpose(1, 2).contiguous() for x in tokens]

    def attend(query, key, value):
        of_query = softmax_kernel(query, projection_matrix=w, is_query=True)
        return linear_attention(
            of_query, softmax_kernel(key, projection_matrix=w, is_query=False), value
        )

    def forward(_):
        with torch.no_grad():
            attend(*tokens)

    def backward(_):
        leaves = [x.detach().requires_grad_() for x in tokens]
        attend(*leaves).square().sum().backward()

    return backward if is_gradient else forward

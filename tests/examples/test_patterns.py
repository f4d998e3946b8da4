"""Tests that run the snippets of the patterns for models of others, in their order."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import export

import examples
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter

ROOT = pathlib.Path(examples.__file__).parents[1]
PAGE = (ROOT / "docs" / "how_to" / "models_of_others.md").read_text()
PATTERNS = PAGE.split("\n## Patterns\n")[1].split("\n## ")[0]
LENGTH, WIDTH, VOCABULARY = 6, 8, 5


class Model(nn.Module):
    """A language model of one layer."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        adapter = linen_adapter.RandomFeatureAttention(6, is_causal=True, parent=None)
        x = x + nn.MultiHeadDotProductAttention(2, attention_fn=adapter)(x)
        return nn.Dense(VOCABULARY)(x)


def loss(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def snippets():
    """Returns the code of each section, by its heading."""
    sections = [section.split("\n", 1) for section in PATTERNS.split("\n### ")[1:]]
    code = {
        heading: "".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
        for heading, text in sections
    }
    return {heading: one for heading, one in code.items() if one}


@pytest.mark.slow
def test_the_patterns_run_one_after_the_other(capsys):
    code = snippets()
    assert len(code) == 5
    model, tokens = Model(), jnp.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
    names = {
        "jax": jax,
        "nn": nn,
        "nnx": nnx,
        "optax": optax,
        "model": model,
        "tokens": tokens,
        "loss": loss,
    }

    exec(code["A TrainState that keeps W (Linen)"], names)
    state, first = names["train_step"](names["state"], tokens)
    _, second = names["train_step"](state, tokens)
    assert second < first

    rngs = nnx.Rngs(0)
    adapter = nnx_adapter.RandomFeatureAttention(2, 4, 6, masks="packed", rngs=rngs)
    attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, attention_fn=adapter, rngs=rngs)
    names |= {"nnx_model": attention, "key": jax.random.key(2)}
    before = [w.copy() for w in jax.tree.leaves((state.random_features, adapter.projection))]
    exec(code["Redraws"], names)
    state = names["state"]
    for old, new in zip(
        before, jax.tree.leaves((state.random_features, adapter.projection)), strict=True
    ):
        assert (old != new).all()

    x = jax.random.normal(jax.random.key(3), (2, LENGTH, WIDTH))
    q, k, v = attention.query(x), attention.key(x), attention.value(x)
    ids = np.array([[1, 1, 2, 2, 2, 3], [1, 2, 2, 2, 3, 3]])
    names |= {"x": x, "q": q, "k": k, "v": v, "segment_ids": ids}
    names |= {"attention": attention, "adapter": adapter}
    exec(code["Packed sequences"], names)
    own = attention.out(adapter(q, k, v, segment_ids=ids))
    np.testing.assert_allclose(attention(x, mask=ids[:, None, None]), own, rtol=1e-5, atol=1e-6)

    names["state_variables"] = {"params": state.params, "random_features": state.random_features}
    exec(code["How good is it, layer by layer"], names)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 * (1 + 2)  # Two tables of two heads each.

    pytest.importorskip("flatbuffers")
    exec(code["Export"], names)
    again = export.deserialize(names["data"])
    expected = model.apply(names["arrays"], tokens)
    np.testing.assert_allclose(again.call(names["arrays"], tokens), expected, rtol=1e-5, atol=1e-6)

"""Errors of the sentence encoder on kinds of text that feature maps were not fitted to."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import tqdm
from ml_collections import ConfigDict

from experiments.harness import resumable
from experiments.swap import encoder, texts
from experiments.swap.measure_encoder import Subject, packed_errors, prepare, summary
from experiments.swap.methods import baselines


def run(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Measures what ``pieces`` lack, and returns the section ``kinds`` of the results.

    For each kind of text, maps are fitted to windows of all other kinds. "mean" averages the kinds.

    Raises:
      UserError: If the model is not there, or there are too few texts.
    """
    ours, model_dir = config.kinds, config.model_dir

    @functools.cache
    def model() -> encoder.Encoder:
        return encoder.load_model(encoder.find("model.safetensors", model_dir))

    @functools.cache
    def windows(length: int) -> dict[str, np.ndarray]:
        tokenizer = encoder.load_tokenizer(encoder.find("tokenizer.json", model_dir))
        kinds = texts.kinds().items()
        return {kind: texts.windows(tokenizer, found, length) for kind, found in kinds}

    @functools.lru_cache(maxsize=1)
    def subject(kind: str, length: int, seed: int) -> Subject:
        sizes = {"num_fit": ours.num_fit_texts, "num_test": ours.num_test_texts}
        return prepare(model(), texts.split_kinds(windows(length), kind, seed=seed, **sizes))

    options = ConfigDict(config.encoder.to_dict() | {"learned": ours.learned.to_dict()})
    methods: dict[str, int | None] = dict.fromkeys(baselines(config.encoder.bandwidth))
    methods |= dict.fromkeys(config.methods, ours.num_features)
    found: dict[str, dict[str, dict[str, list[np.ndarray]]]] = {}
    cases = [*itertools.product(ours.lengths, config.seeds, texts.KINDS)]  # Short texts first.
    for length, seed, kind in tqdm.tqdm(cases, desc="kinds", dynamic_ncols=True):
        inputs = functools.partial(subject, kind, length, seed)
        for name, m in methods.items():
            piece = f"kinds-{name}-{kind.replace(' ', '_')}-{length}-{seed}"
            errors = pieces.get(piece, packed_errors, inputs, name, m, seed, options)
            by_kind = found.setdefault(str(length), {}).setdefault(name, {})
            by_kind.setdefault(kind, []).append(errors)
    for by_kind in itertools.chain.from_iterable(one.values() for one in found.values()):
        by_kind["mean"] = [np.stack(kept) for kept in zip(*by_kind.values(), strict=True)]
    return {
        "num_features": ours.num_features,
        "lengths": {
            length: {
                name: {kind: summary(kept, ours.num_test_texts) for kind, kept in by_kind.items()}
                for name, by_kind in by_name.items()
            }
            for length, by_name in found.items()
        },
        "seconds": pieces.seconds("kinds-*"),
    }

"""Softmax attention of trained models, replaced by random features without and with fine-tuning.

Shows:     error, cosine, accuracy and bits against the number of features; the same against the
           number of steps of fine-tuning; mean |x + y|^2 before and after; predicted beside
           measured errors of attention to random keys and to those of an encoder
Command:   python -m experiments.swap.main --workdir=runs/swap --config.model_dir=DIR
           --config.data_dir=DIR
Hardware:  two CPU cores
"""

from ml_collections import ConfigDict

# Shared by the models that are trained here.
TRAINED = {
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "b2": 0.999,
    "clip_norm": 1.0,
    "num_features": (16, 32, 64, 128),  # Of each head, without fine-tuning.
    "tuned_features": 64,
    "tuned_steps": (0, 10, 100, 1000),  # Numbers of steps after which the model is scored.
    "tuned_learning_rate": 3e-4,  # Constant.
}
VISION = TRAINED | {
    "num_fit": 256,  # Training images that feature maps are fitted on.
    "learned": {"num_steps": 300, "batch_size": 32, "learning_rate": 0.1},
    "exact_keys": 8,  # In the place of as many features.
    "shift": 0.5,
}
VIT = {"width": 96, "depth": 4, "num_heads": 6, "mlp_dim": 192}


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.parts = (
        "predicted",
        "predicted_heads",
        "encoder",
        "kinds",
        "digits",
        "char_lm",
        "fashion_mnist",
    )
    config.methods = (
        "positive_iid",
        "positive_simplex",
        "hyperbolic",
        "optimal",
        "sderf",
        "calibrated_simplex",
        "calibrated",
        "mixture",
        "learned_from_random",
        "learned",
        "band_positive",
        "band_calibrated",
        "band_learned",
        "keys_calibrated",
        "band_keys_calibrated",
        "band_keys_learned",
    )
    # Those to fine-tune with; softmax is always one more.
    config.tuned_methods = ("positive_simplex", "calibrated", "band_calibrated")
    # A seed decides the texts, the training, the projections and the fine-tuning.
    config.seeds = (0, 1, 2, 3, 4)
    config.model_dir = ""  # Folder of all-MiniLM-L6-v2; see encoder.find.
    config.data_dir = ""  # Folder of the prepared Fashion-MNIST; see experiments/vit.
    config.predicted = {
        "dim": 64,
        "num_queries": 4,
        "num_keys": 64,
        "num_features": 128,
        "num_draws": 100,  # Of W for each seed.
        "lengths": (0.25, 0.5, 0.75, 1.0, 1.5),
    }
    config.predicted_heads = {
        "num_queries": 4,  # Of one text of the encoder, for each seed.
        "num_draws": 20,  # Of W for each seed.
        "num_features": (64, 128),
    }
    config.encoder = {
        "num_fit_texts": 8,  # Help pages that feature maps are fitted on.
        "num_test_texts": 16,  # Other help pages.
        "length": 128,  # Tokens of each text.
        "bandwidth": 16,
        "exact_keys": 16,  # In the place of as many features.
        "num_features": (32, 64, 128, 256, 512),
        "learned": {"num_steps": 100, "batch_size": 1, "learning_rate": 0.1},
    }
    config.kinds = {  # The encoder, with the band and keys of the section above.
        "num_fit_texts": 24,  # Windows that feature maps are fitted on, of all kinds but one.
        "num_test_texts": 8,  # Windows of the kind that is left.
        "lengths": (128, 256, 512),
        "num_features": 128,
        "learned": {"num_steps": 250, "batch_size": 1, "learning_rate": 0.1},
    }
    config.digits = VISION | {
        "batch_size": 64,
        "num_steps": 600,
        "learning_rate": 1e-3,
        "test_batch_size": 360,
        "tuned_features": 16,
        "flip": False,
        "model": VIT | {"patch_size": 2, "dropout_rate": 0.1},  # 16 tokens.
    }
    config.fashion_mnist = VISION | {
        "batch_size": 128,
        "num_steps": 1406,  # 3 epochs.
        "learning_rate": 2e-3,
        "warmup_steps": 150,
        "test_batch_size": 512,
        "flip": True,
        "model": VIT | {"patch_size": 7, "dropout_rate": 0.05},  # 16 tokens.
    }
    config.char_lm = TRAINED | {
        "batch_size": 8,
        "num_steps": 2000,
        "learning_rate": 6e-3,
        "b2": 0.99,
        "num_fit": 32,
        "test_batch_size": 29,
        "tuned_learning_rate": 1e-3,
        "learned": {"num_steps": 300, "batch_size": 2, "learning_rate": 0.1},
        "context": 256,
        "bandwidth": 16,
        "exact_keys": 8,  # In the place of as many features.
        "model": {"width": 64, "depth": 2, "num_heads": 4},
    }
    return config

"""Draft."""
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.dataset = "digits"
    config.data_dir = ""
    config.batch_size = 64
    config.eval_batch_size = 360
    config.num_steps = 1500
    config.learning_rate = 1e-3
    config.warmup_steps = 150
    config.weight_decay = 0.1
    config.clip_norm = 1.0
    config.redraw_interval = 100
    config.log_interval = 25
    config.eval_interval = 150
    config.augment = {"shift": 1, "flip": False}
    config.mesh = {"data": -1}
    config.model = {
        "patch_size": 2, "width": 64, "depth": 4, "num_heads": 4, "mlp_dim": 128, "dropout_rate": 0.1,
        "pooling": "average", "attention": "simplex", "num_features": 34, "block": "regular", "dtype": "float32"}
    return config

"""A small ViT on the 60,000 images of Fashion-MNIST, for a CPU.

Shows:     the data set of the paper's Fig. 9b, not its model, which is far larger
Command:   python -m experiments.vit.main --config=experiments/vit/configs/fashion_mnist.py
           --workdir=runs/fashion --config.data_dir=DIR
Hardware:  two CPU cores
Time:      11 minutes with another run on the same cores
Expected:  test accuracy 0.884 (simplex), 0.885 (orthogonal), 0.884 (iid), 0.884 (exact), each
           the mean over seeds 0 to 2 with a standard deviation of 0.001 to 0.003, on a random split
           that is not the official one
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.dataset = "fashion_mnist"
    config.data_dir = ""
    config.in_memory = True
    config.shuffle_window = 0
    config.held_out = 0.0
    config.image_size = 28
    config.num_workers = 0
    config.eval_crop = 1.0

    config.batch_size = 128
    config.eval_batch_size = 512
    config.num_steps = 3750  # 8 epochs.
    config.learning_rate = 2e-3
    config.warmup_steps = 300
    config.weight_decay = 0.1
    config.b1 = 0.9
    config.b2 = 0.999
    config.eps = 1e-8
    config.clip_norm = 1.0
    config.redraw_interval = 0
    config.calibrate_interval = 0
    config.log_interval = 50
    config.eval_interval = 469  # An epoch.
    config.augment = {
        "shift": 0.5,
        "flip": True,
        "crop_area": 1.0,
        "randaugment_layers": 0,
        "randaugment_magnitude": 0.0,
        "mixup": 0.0,
    }

    config.diagnostics = {"images": 16, "redraws": 8}
    config.profile = {"start": 0, "steps": 0}
    config.checkpoint = {"interval": 469, "keep": 2, "folder": ""}
    config.mirror = ""
    config.num_microbatches = 1
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1, "sequence": 1}
    config.model = {
        "patch_size": 7,  # 16 tokens.
        "width": 96,
        "depth": 4,
        "num_heads": 6,
        "mlp_dim": 192,
        "dropout_rate": 0.05,
        "pooling": "average",
        "attention": "simplex",
        "num_features": 34,  # Two regular simplices of 17 points in the heads' 16 dimensions.
        "feature_map": "positive",
        "exact_bandwidth": -1,
        "implementation": "default",
        "block": "regular",
        "dtype": "float32",
        "remat": "none",
        "scan": False,
    }
    return config

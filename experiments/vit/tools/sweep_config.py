"""Learning rates of a ViT-S, of depth 12 and in bfloat16, on a CPU.

Shows:     the largest learning rate at which each attention trains stably
Command:   python -m experiments.vit.tools.sweep --workdir=runs/sweep --config.data_dir=DIR
Hardware:  two CPU cores
Time:      an hour beside other programs
Expected:  the table in README.md, Learning rates

The comments in imagenet2012.py explain the choices. Depth, size and features of a head, type,
dropout, optimizer and clipping are those of the pods, and the width is that of a ViT-S. The batch
and the number of steps are far smaller, and there is neither mixup nor more than half a pixel of
shift, as a run sees only 960 images.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the config of the sweep of README.md, Learning rates."""
    config = ml_collections.ConfigDict()
    config.sweep = {
        "arms": ("exact", "simplex", "calibrated"),
        "learning_rates": (3e-4, 1e-3, 3e-3, 1e-2),
        "seeds": (0, 1),
    }
    config.seed = 0  # The seeds of the sweep replace it, and its rates the learning rate.
    config.dataset = "fashion_mnist"
    config.data_dir = ""
    config.in_memory = True
    config.shuffle_window = 0
    config.held_out = 0.01
    config.image_size = 28
    config.num_workers = 0
    config.eval_crop = 1.0

    config.batch_size = 16
    config.eval_batch_size = 256
    config.num_steps = 60
    config.learning_rate = 1e-3
    config.warmup_steps = 6  # A tenth of the run, as of fashion_mnist_b.py.
    config.weight_decay = 0.1
    config.b1 = 0.9
    config.b2 = 0.999
    config.eps = 1e-8
    config.clip_norm = 1.0
    config.redraw_interval = 0
    config.calibrate_interval = 20  # Of the calibrated arm; the others have none.
    config.log_interval = 1
    config.eval_interval = 60
    config.augment = {
        "shift": 0.5,
        "flip": True,
        "crop_area": 1.0,
        "randaugment_layers": 0,
        "randaugment_magnitude": 0.0,
        "mixup": 0.0,
    }

    config.diagnostics = {"images": 0, "redraws": 8}
    config.profile = {"start": 0, "steps": 0}
    config.checkpoint = {"interval": 0, "keep": 1, "folder": ""}
    config.mirror = ""
    config.num_microbatches = 1
    config.mesh = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
    config.model = {
        "patch_size": 7,  # 16 patches and the class token.
        "width": 384,  # As a ViT-S: six heads of 64 dimensions, like the twelve of a ViT-B.
        "depth": 12,
        "num_heads": 6,
        "mlp_dim": 1536,
        "dropout_rate": 0.1,
        "pooling": "token",
        "attention": "simplex",
        "num_features": 130,
        "feature_map": "calibrated",
        "exact_bandwidth": -1,
        "implementation": "default",
        "block": "regular",
        "dtype": "bfloat16",
        "remat": "none",
        "scan": True,  # Compiles in a fraction of the time.
    }
    return config

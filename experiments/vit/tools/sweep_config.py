"""Learning rates of a ViT-S, of depth 12 and in bfloat16, on a CPU.

Shows:     the largest learning rate at which each attention trains stably
Command:   python -m experiments.vit.tools.sweep --workdir=runs/sweep --config.data_dir=DIR
Hardware:  two CPU cores
Time:      84 minutes while other programs ran
Expected:  the table in README.md, Learning rates

The comments in imagenet2012.py explain the choices. Depth, size and features of a head, type,
dropout, optimizer and clipping are those of the pods, and the width is that of a ViT-S. The batch
and the number of steps are far smaller, and there is neither mixup nor more than half a pixel of
shift, as a run sees only 960 images.
"""

from ml_collections import ConfigDict

from experiments.vit.config import defaults


def get_config() -> ConfigDict:
    """Returns the config of the sweep of README.md, Learning rates."""
    config = defaults()
    config.dataset = "fashion_mnist"
    config.image_size = 28
    # The seeds of the sweep replace the seed, and its rates the learning rate.
    config.sweep = {
        "arms": ("exact", "simplex", "calibrated"),
        "learning_rates": (3e-4, 1e-3, 3e-3, 1e-2),
        "seeds": (0, 1),
    }
    config.held_out = 0.01
    config.batch_size = 16
    config.eval_batch_size = 256
    config.num_steps = config.eval_interval = 60
    config.warmup_steps = 6  # A tenth of the run, as of fashion_mnist_b.py.
    config.calibrate_interval = 20  # Of the calibrated arm; the others have none.
    config.log_interval = 1
    config.augment.flip = True
    config.diagnostics.images = 0
    config.checkpoint = {"interval": 0, "keep": 1, "folder": ""}
    config.mesh.data = 1
    config.model.update(
        patch_size=7,  # 16 patches and the class token.
        width=384,  # As a ViT-S: six heads of 64 dimensions, like the twelve of a ViT-B.
        depth=12,
        mlp_dim=1536,
        pooling="token",
        num_features=130,
        feature_map="calibrated",
        dtype="bfloat16",
        scan=True,  # Compiles in a fraction of the time.
    )
    return config

"""The shape and arithmetic of a vision transformer, without its parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

from simrf_jax._src import checks
from simrf_jax._src.attention.implementations import IMPLEMENTATIONS, Implementation
from simrf_jax._src.projections import BLOCK_MODES, COUPLINGS, BlockMode, Coupling

Attention: TypeAlias = Coupling | Literal["exact"]
FeatureMap: TypeAlias = Literal["positive", "relu", "calibrated"]
ATTENTIONS = (*COUPLINGS, "exact")
POOLINGS = ("average", "token")
DTYPES = ("float32", "bfloat16")
REMATS = ("none", "block", "dots")
FEATURE_MAPS = get_args(FeatureMap)

# B and L: Dosovitskiy et al. (2021), Table 1, https://arxiv.org/abs/2010.11929
# Ti and S: Touvron et al. (2021), Table 1, https://arxiv.org/abs/2012.12877
SIZES = {
    "Ti": {"width": 192, "depth": 12, "num_heads": 3, "mlp_dim": 768},
    "S": {"width": 384, "depth": 12, "num_heads": 6, "mlp_dim": 1536},
    "B": {"width": 768, "depth": 12, "num_heads": 12, "mlp_dim": 3072},
    "L": {"width": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Shape and arithmetic of a ViT.

    The defaults are the ViT-B/16 of Reid et al., Simplex Random Features, Sec. 5.4
    (https://arxiv.org/abs/2301.13856).

    Attributes:
      image_size: Height and width in pixels, multiples of the patch size.
      channels: Channels of the images.
      num_classes: Number of classes, the width of the output.
      patch_size: Side of a square patch in pixels.
      width: Width of the tokens.
      depth: Number of transformer layers.
      num_heads: Number of attention heads, a divisor of the width.
      mlp_dim: Hidden width of the MLPs.
      dropout_rate: Dropout rate, at least 0 and below 1, after the embedding, the attention and
        both dense layers of each MLP. Attention weights are never dropped.
      pooling: ``"average"`` classifies the mean of the tokens, ``"token"`` a class token.
      attention: Coupling of random-feature attention, ``"iid"``, ``"orthogonal"``, ``"simplex"`` or
        ``"simplex_plus"``, or ``"exact"`` for softmax attention.
      num_features: Number of random features of each head.
      feature_map: Feature map of random-feature attention. ``"positive"`` and ``"calibrated"``
        estimate softmax attention; ``"calibrated"`` is the positive map until
        ``simrf_jax.integrations.nnx.calibrate`` fits it. ``"relu"`` is another kernel. It must be
        ``"positive"`` for softmax attention.
      block: Row-block mode of the projections, ``"regular"`` or ``"square"``; see
        ``simrf_jax.draw_projection``.
      dtype: ``"float32"`` or ``"bfloat16"`` for the computation; parameters are float32.
      remat: Values that each transformer layer keeps for its gradient. ``"none"`` keeps all and
        recomputes nothing, ``"dots"`` keeps the products with parameters and the dropout masks,
        ``"block"`` keeps only the layer's input.
      scan: True to scan over the transformer layers, which compiles one layer instead of all. The
        arrays of the layers are then stacked, ``[depth, ...]``; the model computes the same
        function.
      sequence_axis: Mesh axis that shards the tokens; see ``simrf_jax.random_feature_attention``.
        The model must then be called inside ``jax.set_mesh``. None for no axis.
      batch_axis: Mesh axes that shard the batch, for the Pallas kernels of random-feature
        attention; see ``simrf_jax.random_feature_attention``.
      head_axis: Mesh axes that shard the heads, for the Pallas kernels.
      implementation: ``"pallas_tpu"``, ``"pallas_gpu"``, ``"xla"`` or None; see
        ``simrf_jax.random_feature_attention``.
      exact_bandwidth: Distance in tokens over which random-feature attention sees keys exactly; see
        ``simrf_jax.random_feature_attention``. Patches are in row-major order, after the class
        token. None for no exact band; softmax attention and ``feature_map="relu"`` require None.

    Raises:
      TypeError: If a size is not an integer, the image size is not a pair, the dropout rate is not
        a number or scan is neither True nor False.
      ValueError: If a name is unknown, a number is out of range or the sizes do not fit together.
    """

    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    num_classes: int = 1000
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_dim: int = 3072
    dropout_rate: float = 0.1
    pooling: str = "token"
    attention: Attention = "simplex"
    num_features: int = 130
    feature_map: FeatureMap = "positive"
    block: BlockMode = "regular"
    dtype: str = "bfloat16"
    remat: str = "none"
    scan: bool = False
    sequence_axis: str | None = None
    batch_axis: str | tuple[str, ...] | None = None
    head_axis: str | tuple[str, ...] | None = None
    implementation: Implementation | None = None
    exact_bandwidth: int | None = None

    def __post_init__(self) -> None:
        checks.one_of("attention", self.attention, ATTENTIONS)
        checks.one_of("pooling", self.pooling, POOLINGS)
        checks.one_of("block", self.block, BLOCK_MODES)
        checks.one_of("dtype", self.dtype, DTYPES)
        checks.one_of("remat", self.remat, REMATS)
        checks.one_of("feature_map", self.feature_map, FEATURE_MAPS)
        checks.boolean("scan", self.scan)
        checks.axis_names("batch_axis", self.batch_axis)
        checks.axis_names("head_axis", self.head_axis)
        checks.axis_names("sequence_axis", self.sequence_axis)
        checks.one_of("implementation", self.implementation, (*IMPLEMENTATIONS, None))
        sizes = ("channels", "num_classes", "patch_size", "width", "depth", "num_heads", "mlp_dim")
        for name in (*sizes, "num_features"):
            checks.positive_int(name, getattr(self, name))
        if not isinstance(self.image_size, tuple) or len(self.image_size) != 2:
            raise TypeError(f"image_size must be (height, width), got {self.image_size!r}.")
        for side in self.image_size:
            checks.positive_int("image_size", side)
        if any(side % self.patch_size for side in self.image_size):
            raise ValueError(
                f"image_size must be multiples of patch_size={self.patch_size}, "
                f"got {self.image_size}."
            )
        self._check_features()
        if self.width % self.num_heads:
            raise ValueError(
                f"width must be a multiple of num_heads, got {self.width} and {self.num_heads}."
            )
        if self.attention in ("simplex", "simplex_plus") and self.width == self.num_heads:
            raise ValueError(
                f"attention={self.attention!r} needs heads of at least 2 dimensions, got "
                f"width={self.width} and num_heads={self.num_heads}."
            )
        if not isinstance(self.dropout_rate, (int, float)):
            raise TypeError(f"dropout_rate must be a number, got {self.dropout_rate!r}.")
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"dropout_rate must be in [0, 1), got {self.dropout_rate}.")

    def _check_features(self) -> None:
        """Refuses a feature map or an exact band that the attention does not support."""
        if self.attention == "exact" and self.feature_map != "positive":
            raise ValueError(
                "feature_map is for random-feature attention, got "
                f"{self.feature_map!r} for attention='exact'."
            )
        if self.exact_bandwidth is None:
            return
        checks.integer("exact_bandwidth", self.exact_bandwidth, least=0)
        if self.attention == "exact":
            raise ValueError(
                "exact_bandwidth is for random-feature attention, got "
                f"{self.exact_bandwidth} for attention='exact'."
            )
        if self.feature_map == "relu":
            raise ValueError(
                "exact_bandwidth is for feature maps that estimate softmax attention, got "
                f"{self.exact_bandwidth} for feature_map='relu'."
            )

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens: the patches, and the class token if there is one."""
        height, width = (side // self.patch_size for side in self.image_size)
        return height * width + (self.pooling == "token")

    @classmethod
    def named(cls, name: str, **overrides: Any) -> ViTConfig:
        """Returns the config of a published model size with any patch size.

        Args:
          name: ``"Ti"``, ``"S"``, ``"B"`` or ``"L"``, a slash, and the patch size in pixels, as in
            ``"B/16"``.
          **overrides: Values of other fields.

        Raises:
          TypeError: If the patch size is given twice.
          ValueError: If the model size is unknown or the patch size is not a number.

        Example:
          >>> ViTConfig.named("B/16") == ViTConfig()
          True
          >>> ViTConfig.named("Ti/4", image_size=(28, 28), channels=1).width
          192
        """
        size, _, patch = name.partition("/")
        checks.one_of("the size in a name like 'B/16'", size, SIZES)
        if not patch.isdecimal():
            raise ValueError(f"name must end in a patch size, as in 'B/16', got {name!r}.")
        if "patch_size" in overrides:
            raise TypeError(f"patch_size is in the name {name!r}; do not give it twice.")
        return cls(**{**SIZES[size], "patch_size": int(patch), **overrides})

"""RandAugment: a few random distortions of one strength."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import PIL.Image
from PIL import ImageEnhance, ImageOps

# The gray that moves into view, as in the TPU implementation of RandAugment.
_GREY = 128


def randaugment(
    image: PIL.Image.Image, rng: np.random.Generator, *, num_layers: int, magnitude: float
) -> PIL.Image.Image:
    """Applies ``num_layers`` operations, drawn with replacement from ``OPERATIONS``.

    Args:
      image: In mode L or RGB.
      rng: Draws the operations, and the direction of those that have one.
      num_layers: N of the paper; with 0 the image stays as it is.
      magnitude: M of the paper, from 0, where most operations do nothing, to 10.

    Returns:
      An image of the same size and mode.

    Example:
      >>> image = PIL.Image.new("RGB", (8, 6))
      >>> rng = np.random.default_rng(0)
      >>> randaugment(image, rng, num_layers=2, magnitude=10).size
      (8, 6)

    References:
      Cubuk et al., RandAugment: Practical Automated Data Augmentation with a Reduced Search Space
      (NeurIPS 2020), Sec. 3, for the fourteen operations; their ranges are those that torchvision
      gives them, in which a larger magnitude always distorts more. Where the paper's own code
      solarises and posterises less at a larger one, this does not follow it.
    """
    operations = tuple(OPERATIONS.values())
    for _ in range(num_layers):
        operation = operations[rng.integers(len(operations))]
        direction = rng.choice((-1.0, 1.0))
        image = operation(image, magnitude / 10, direction)
    return image


def _affine(image: PIL.Image.Image, row: int, column: int, entry: float) -> PIL.Image.Image:
    """Takes each pixel from ``matrix @ (x, y, 1)``, an identity with another entry."""
    matrix = np.eye(2, 3)
    matrix[row, column] = entry
    method = PIL.Image.Transform.AFFINE
    return image.transform(image.size, method, matrix.ravel().tolist(), fillcolor=_fill(image))


def _fill(image: PIL.Image.Image) -> int | tuple[int, ...]:
    return _GREY if image.mode == "L" else (_GREY,) * 3


def _enhance(
    enhancer: Callable, image: PIL.Image.Image, strength: float, sign: float
) -> PIL.Image.Image:
    return enhancer(image).enhance(1 + 0.9 * strength * sign)


# Each distorts an image with a strength in [0, 1], in a direction of -1 or 1. A translation is by
# 150 pixels of the 331 that the images of AutoAugment had.
OPERATIONS: dict[str, Callable[[PIL.Image.Image, float, float], PIL.Image.Image]] = {
    "identity": lambda image, strength, sign: image,
    "autocontrast": lambda image, strength, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, strength, sign: ImageOps.equalize(image),
    "posterize": lambda image, strength, sign: ImageOps.posterize(image, 8 - round(4 * strength)),
    "solarize": lambda image, strength, sign: ImageOps.solarize(image, round(256 * (1 - strength))),
    "color": functools.partial(_enhance, ImageEnhance.Color),
    "contrast": functools.partial(_enhance, ImageEnhance.Contrast),
    "brightness": functools.partial(_enhance, ImageEnhance.Brightness),
    "sharpness": functools.partial(_enhance, ImageEnhance.Sharpness),
    "rotate": lambda image, strength, sign: image.rotate(
        30 * strength * sign, fillcolor=_fill(image)
    ),
    "shear_x": lambda image, strength, sign: _affine(image, 0, 1, 0.3 * strength * sign),
    "shear_y": lambda image, strength, sign: _affine(image, 1, 0, 0.3 * strength * sign),
    "translate_x": lambda image, strength, sign: _affine(
        image, 0, 2, 150 / 331 * image.size[0] * strength * sign
    ),
    "translate_y": lambda image, strength, sign: _affine(
        image, 1, 2, 150 / 331 * image.size[1] * strength * sign
    ),
}

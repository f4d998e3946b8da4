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


# Distorts an image with a strength in [0, 1] in a direction of -1 or 1.
Operation = Callable[[PIL.Image.Image, float, float], PIL.Image.Image]


def _identity(image: PIL.Image.Image, strength: float, direction: float) -> PIL.Image.Image:
    return image


def _autocontrast(image: PIL.Image.Image, strength: float, direction: float) -> PIL.Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: PIL.Image.Image, strength: float, direction: float) -> PIL.Image.Image:
    return ImageOps.equalize(image)


def _posterize(image: PIL.Image.Image, strength: float, direction: float) -> PIL.Image.Image:
    return ImageOps.posterize(image, bits=8 - round(4 * strength))


def _solarize(image: PIL.Image.Image, strength: float, direction: float) -> PIL.Image.Image:
    return ImageOps.solarize(image, threshold=round(256 * (1 - strength)))


def _enhance(
    image: PIL.Image.Image, strength: float, direction: float, *, enhancer: Callable
) -> PIL.Image.Image:
    return enhancer(image).enhance(1 + 0.9 * strength * direction)


def _rotate(image: PIL.Image.Image, strength: float, direction: float) -> PIL.Image.Image:
    return image.rotate(30 * strength * direction, fillcolor=_fill(image))


def _shear(
    image: PIL.Image.Image, strength: float, direction: float, *, axis: int
) -> PIL.Image.Image:
    matrix = np.eye(2, 3)
    matrix[axis, 1 - axis] = 0.3 * strength * direction
    return _affine(image, matrix)


def _translate(
    image: PIL.Image.Image, strength: float, direction: float, *, axis: int
) -> PIL.Image.Image:
    matrix = np.eye(2, 3)
    # 150 pixels of the 331 that the images of AutoAugment had.
    matrix[axis, 2] = 150 / 331 * image.size[axis] * strength * direction
    return _affine(image, matrix)


def _affine(image: PIL.Image.Image, matrix: np.ndarray) -> PIL.Image.Image:
    """Takes each pixel from ``matrix @ (x, y, 1)``."""
    method = PIL.Image.Transform.AFFINE
    return image.transform(image.size, method, matrix.ravel().tolist(), fillcolor=_fill(image))


def _fill(image: PIL.Image.Image) -> int | tuple[int, ...]:
    return _GREY if image.mode == "L" else (_GREY,) * 3


OPERATIONS: dict[str, Operation] = {
    "identity": _identity,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "posterize": _posterize,
    "solarize": _solarize,
    "color": functools.partial(_enhance, enhancer=ImageEnhance.Color),
    "contrast": functools.partial(_enhance, enhancer=ImageEnhance.Contrast),
    "brightness": functools.partial(_enhance, enhancer=ImageEnhance.Brightness),
    "sharpness": functools.partial(_enhance, enhancer=ImageEnhance.Sharpness),
    "rotate": _rotate,
    "shear_x": functools.partial(_shear, axis=0),
    "shear_y": functools.partial(_shear, axis=1),
    "translate_x": functools.partial(_translate, axis=0),
    "translate_y": functools.partial(_translate, axis=1),
}

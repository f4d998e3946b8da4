"""Crops, mixtures and distortions of images, each a function of a random generator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import PIL.Image
from PIL import ImageEnhance, ImageOps

# (left, upper, right, lower) in pixels; may be fractions.
Box = tuple[float, float, float, float]


def inception_box(size: tuple[int, int], least_area: float, rng: np.random.Generator) -> Box:
    """Draws a box: a uniform share of the area, a log-uniform aspect ratio in [3/4, 4/3].

    Args:
      size: Width and height of the image.
      least_area: Smallest share of the image's area; the largest is 1.
      rng: Generator of up to ten boxes, of which the first that fits is taken.

    Returns:
      Box, or the whole image if none of ten fits.

    Example:
      >>> box = inception_box((640, 480), 0.05, np.random.default_rng(0))
      >>> 0 <= box[0] < box[2] <= 640 and 0 <= box[1] < box[3] <= 480
      True

    References:
      Szegedy et al., Going Deeper with Convolutions (CVPR 2015), Sec. 6, for at least 8% of the
      area; 5% is what TensorFlow made the custom.
    """
    for _ in range(10):
        area = rng.uniform(least_area, 1.0) * size[0] * size[1]
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if width <= size[0] and height <= size[1]:
            left, upper = rng.uniform(0, size[0] - width), rng.uniform(0, size[1] - height)
            # The sum may be above the side by a rounding.
            return left, upper, min(left + width, size[0]), min(upper + height, size[1])
    return 0, 0, *size


def center_box(size: tuple[int, int], share: float) -> Box:
    """Returns the centered square whose side is a share of the image's shorter side.

    Cutting it out and resizing it to N x N equals resizing the shorter side to N / share and then
    cutting out the N x N pixels in the center.

    Example:
      >>> center_box((640, 480), 0.875)
      (110.0, 30.0, 530.0, 450.0)
    """
    side = share * min(size)
    left, upper = (size[0] - side) / 2, (size[1] - side) / 2
    return left, upper, left + side, upper + side


def resize(image: PIL.Image.Image, box: Box, side: int) -> PIL.Image.Image:
    """Resizes the part of an image in a box to a square, linearly and with antialiasing."""
    return image.resize((side, side), PIL.Image.Resampling.BILINEAR, box=box)


def mixup(
    images: np.ndarray, labels: np.ndarray, *, weights: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mixes each image with its neighbor, rows 0 and 1, 2 and 3, and so on.

    ``images[i] = weights[i] * images[i] + (1 - weights[i]) * images[i ^ 1]``, and the same of the
    one-hot labels. Neighbors are on one host, whatever the number of hosts.

    Args:
      images: ``[batch, height, width, channels]``; batch is even.
      labels: ``[batch]``.
      weights: ``[batch]`` in [0, 1]; Beta(alpha, alpha) in the paper.
      num_classes: Number of classes of the labels.

    Returns:
      Images, and float32 soft labels ``[batch, num_classes]`` that sum to 1.

    Example:
      >>> images, labels = np.zeros((2, 1, 1, 1)), np.array([0, 2])
      >>> mixup(images, labels, weights=np.array([0.75, 1.0]), num_classes=3)[1].tolist()
      [[0.75, 0.0, 0.25], [0.0, 0.0, 1.0]]

    References:
      Zhang et al., mixup: Beyond Empirical Risk Minimization (ICLR 2018).
    """
    one_hot = np.zeros((len(labels), num_classes), np.float32)
    one_hot[np.arange(len(labels)), labels] = 1
    w = weights.astype(np.float32)

    def mix(x: np.ndarray) -> np.ndarray:
        mixed = np.empty_like(x)
        # Row by row, what is between two operations stays in the cache.
        for i, own in enumerate(w):
            np.multiply(x[i], own, out=mixed[i])
            mixed[i] += (1 - own) * x[i ^ 1]
        return mixed

    return mix(images), mix(one_hot)


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
      solarizes and posterizes less at a larger one, this does not follow it.
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

"""Crops and mixtures of images, each a function of a random generator."""

from __future__ import annotations

import math

import numpy as np
import PIL.Image

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
    """Mixes each image with its neighbour, rows 0 and 1, 2 and 3, and so on.

    ``images[i] = weights[i] * images[i] + (1 - weights[i]) * images[i ^ 1]``, and the same of the
    one-hot labels. Neighbours are on one host, whatever the number of hosts.

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

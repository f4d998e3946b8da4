import numpy as np
import PIL.Image
import pytest
from PIL import ImageOps

from experiments.vit.data import augment
from experiments.vit.data.augment import OPERATIONS, randaugment
from tests.standard_errors import assert_mean

pytestmark = pytest.mark.fast
COLORS = ("posterize", "solarize", "color", "contrast", "brightness", "sharpness")


def noise(size=(32, 24), mode="RGB"):
    shape = size[::-1] if mode == "L" else (*size[::-1], 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return PIL.Image.fromarray(pixels)


def test_crops_have_uniform_areas_log_uniform_aspects_and_uniform_places():
    rng = np.random.default_rng(0)
    boxes = np.array([augment.inception_box((100, 100), 0.05, rng) for _ in range(8000)])
    left, upper, right, lower = boxes.T
    assert boxes.min() >= 0
    assert boxes.max() <= 100
    width, height = right - left, lower - upper
    area, log_aspect = width * height / 1e4, np.log(width / height)
    # Up to 3/4 of a square every aspect ratio fits, so that nothing is drawn again.
    fits = area <= 0.75
    assert area.min() >= 0.05
    assert_mean(area[fits], (0.05 + 0.75) / 2)
    assert_mean((area[fits] - 0.4) ** 2, 0.7**2 / 12)
    assert_mean(log_aspect[fits], 0)
    assert_mean(log_aspect[fits] ** 2, np.log(4 / 3) ** 2 / 3)
    for start, length in ((left, width), (upper, height)):
        assert_mean(start[fits] / (100 - length[fits]), 0.5)


def test_a_crop_that_never_fits_is_the_whole_image():
    box = augment.inception_box((1000, 10), 0.99, np.random.default_rng(0))
    assert box == (0, 0, 1000, 10)


def test_a_box_is_cut_out_and_resized():
    image = noise()
    cut = augment.resize(image, (4, 8, 20, 24), 16)
    np.testing.assert_array_equal(cut, image.crop((4, 8, 20, 24)))
    whole = augment.resize(noise((16, 16)), augment.center_box((16, 16), 1.0), 16)
    np.testing.assert_array_equal(whole, noise((16, 16)))


def test_the_middle_is_that_of_resizing_and_cutting():
    ramp = PIL.Image.fromarray(np.tile(np.arange(0, 240, 3, dtype=np.uint8), (64, 1)))  # 80 x 64.
    found = augment.resize(ramp, augment.center_box(ramp.size, 0.5), 32)
    shorter = ramp.resize((80, 64), PIL.Image.Resampling.BILINEAR)
    np.testing.assert_allclose(
        np.asarray(found, float), np.asarray(shorter.crop((24, 16, 56, 48)), float), atol=1
    )


def test_mixup_is_the_formula():
    rng = np.random.default_rng(0)
    images, labels, w = rng.random((6, 2, 3, 1)), rng.integers(0, 4, 6), rng.random(6)
    mixed, soft = augment.mixup(images, labels, weights=w, num_classes=4)
    for i, j in ((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)):
        np.testing.assert_allclose(mixed[i], w[i] * images[i] + (1 - w[i]) * images[j], rtol=1e-6)
        expected = w[i] * np.eye(4)[labels[i]] + (1 - w[i]) * np.eye(4)[labels[j]]
        np.testing.assert_allclose(soft[i], expected, rtol=1e-6)


def difference(a, b):
    return np.abs(np.asarray(a, float) - np.asarray(b, float)).mean()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_operations_keep_the_image_and_grow_with_the_strength(name, mode):
    image = noise(mode=mode)
    found = [OPERATIONS[name](image, strength, -1.0) for strength in (0.0, 0.5, 1.0)]
    assert {(x.size, x.mode) for x in found} == {(image.size, mode)}
    distances = [difference(x, image) for x in found]
    if name in ("autocontrast", "equalize"):  # Which have no strength.
        assert distances[0] == distances[1] == distances[2]
    else:
        assert distances[0] == 0
    if name in COLORS:  # Of noise that has moved far nothing is left.
        assert distances == sorted(distances)
    nothing_to_do = name in ("identity", "autocontrast") or (name == "color" and mode == "L")
    assert (distances[2] > 0) == (not nothing_to_do)


def test_operations_do_what_their_names_say():
    image = noise()
    pixels = np.asarray(image).astype(int)
    strongest = {
        "solarize": 255 - pixels,
        "posterize": pixels & 0b11110000,
        "equalize": np.asarray(ImageOps.equalize(image)),
    }
    for name, expected in strongest.items():
        np.testing.assert_array_equal(OPERATIONS[name](image, 1.0, 1.0), expected, err_msg=name)
    brighter = np.asarray(OPERATIONS["brightness"](image, 1.0, 1.0), float)
    np.testing.assert_allclose(brighter, np.minimum(1.9 * pixels, 255), atol=1)
    gray = np.asarray(OPERATIONS["color"](image, 1.0, -1.0), float)
    np.testing.assert_allclose(
        np.ptp(gray, axis=2), 0.1 * np.ptp(pixels.astype(float), axis=2), atol=2
    )


def test_moves_go_as_far_as_they_should_and_fill_up_with_gray():
    image = noise((331, 40))
    right = np.asarray(OPERATIONS["translate_x"](image, 0.2, -1.0))
    np.testing.assert_array_equal(right[:, 30:], np.asarray(image)[:, :-30])
    assert (right[:, :30] == 128).all()
    sheared = np.asarray(OPERATIONS["shear_x"](image, 1.0, 1.0))
    np.testing.assert_array_equal(sheared[30, :300], np.asarray(image)[30, 9:309])  # 0.3 x 30.
    turned = OPERATIONS["rotate"](image, 1.0, -1.0)
    np.testing.assert_array_equal(turned, image.rotate(-30, fillcolor=(128,) * 3))


def test_randaugment_draws_every_operation_as_often_as_any_other(monkeypatch):
    drawn = []

    def noting(index):
        return lambda image, strength, direction: drawn.append((index, strength, direction))

    noted = {name: noting(index) for index, name in enumerate(OPERATIONS)}
    monkeypatch.setattr("experiments.vit.data.augment.OPERATIONS", noted)
    randaugment(noise(), np.random.default_rng(0), num_layers=4000, magnitude=7.0)
    indices, strengths, directions = np.array(drawn).T
    assert (strengths == 0.7).all()
    assert_mean(directions, 0)
    for index in range(14):
        assert_mean((indices == index).astype(float), 1 / 14)


def test_randaugment_is_a_function_of_the_generator():
    a, b, c = (
        randaugment(noise(), np.random.default_rng(s), num_layers=2, magnitude=9.0)
        for s in (5, 5, 6)
    )
    np.testing.assert_array_equal(a, b)
    assert difference(a, c) > 0
    np.testing.assert_array_equal(
        randaugment(noise(), np.random.default_rng(0), num_layers=0, magnitude=9.0), noise()
    )

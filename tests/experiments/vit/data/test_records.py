import io
import struct
import sys
from zlib import crc32

import numpy as np
import PIL.Image
import pytest
import tensorflow_datasets as tfds

from experiments.harness.mistakes import UserError
from experiments.vit.data import records
from experiments.vit.tools import prepare
from tests.experiments.vit import prepared

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_any_mode_have_the_channels_of_the_data_set(mode, channels):
    image = PIL.Image.new("RGB", (5, 4), (90, 90, 90)).convert(mode)
    found = np.asarray(records.decode(prepared.encode(image).getvalue(), channels))
    assert found.shape == ((4, 5) if channels == 1 else (4, 5, 3))
    np.testing.assert_allclose(found, 90, atol=2)


def test_png_is_decoded_to_the_bit():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    encoded = prepared.encode(PIL.Image.fromarray(pixels), "PNG").getvalue()
    np.testing.assert_array_equal(records.decode(encoded, 3), pixels)


def test_a_data_set_that_is_not_there_says_how_to_get_it(tmp_path):
    command = rf"python -m experiments.vit.tools.prepare imagenet2012 --data_dir={tmp_path}$"
    with pytest.raises(UserError, match=command):
        records.open_records("imagenet2012", "train", str(tmp_path))


def test_a_split_that_is_not_there_is_named(tmp_path):
    prepared.write(tmp_path, train=3)
    with pytest.raises(UserError, match="no split 'validation', only train; delete it"):
        records.open_records("imagenet2012", "validation", str(tmp_path))


def rewrite(folder, file, change):
    (path,) = folder.glob(f"imagenet2012/5.1.0/{file}")
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("*train*", lambda b: b[:1000], "00000-of-00001 cannot be read: .* at least 64KB"),
        ("*train*", lambda b: b[:-1], "00000-of-00001 cannot be read: Invalid"),
        ("*train*", lambda b: b"", "00000-of-00001 cannot be read: "),
        ("dataset_info.json", lambda b: b"{", "cannot be read: Failed to load JSON"),
        ("dataset_info.json", lambda b: b.replace(b'"3"', b'"4"'), "hold 4 examples, and holds 3"),
        (
            "dataset_info.json",
            lambda b: b.replace(b'"array_record"', b'"tfrecord"'),
            "is in tfrecord format, not in array_record; delete it and prepare it",
        ),
    ],
)
def test_what_is_damaged_or_half_copied_is_refused(tmp_path, file, change, match):
    prepared.write(tmp_path, train=3)
    rewrite(tmp_path, file, change)
    with pytest.raises(UserError, match=f"{tmp_path}.*{match}"):
        records.open_records("imagenet2012", "train", str(tmp_path))


def test_a_shard_or_the_metadata_that_are_missing_are_named(tmp_path):
    prepared.write(tmp_path, train=3)
    (info,) = tmp_path.glob("*/*/dataset_info.json")
    info.rename(tmp_path / "info")
    with pytest.raises(UserError, match=r"cannot be read: .*dataset_info.json"):
        records.open_records("imagenet2012", "train", str(tmp_path))
    (tmp_path / "info").rename(info)
    (shard,) = tmp_path.glob("*/*/*train*")
    shard.unlink()
    with pytest.raises(UserError, match=rf"{shard} cannot be read: .*No such file"):
        records.open_records("imagenet2012", "train", str(tmp_path))


def test_a_preparation_that_was_stopped_is_as_good_as_none(tmp_path):
    prepared.write(tmp_path, train=3)
    folder = tmp_path / "imagenet2012"
    (folder / "5.1.0").rename(folder / "5.1.0.incompleteAB")
    with pytest.raises(UserError, match="There is no imagenet2012 in"):
        records.open_records("imagenet2012", "train", str(tmp_path))


def test_a_folder_that_is_none_is_refused(tmp_path):
    (tmp_path / "imagenet2012").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be read: .*Not a directory"):
        records.open_records("imagenet2012", "train", str(tmp_path))


def test_the_folder_is_the_given_one_that_of_the_environment_or_the_default(monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/environment")
    assert records.find_data_dir("/given") == "/given"
    assert records.find_data_dir("") == "/environment"
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert records.find_data_dir("") == tfds.core.constants.DATA_DIR


def test_prepare_leaves_what_is_prepared(tmp_path, capsys):
    prepared.write(tmp_path, train=3, validation=2)
    prepare.main(["imagenet2012", f"--data_dir={tmp_path}"])
    assert "100 classes, 3 in train, 2 in validation." in capsys.readouterr().out


def test_prepare_asks_for_files_that_must_be_downloaded_by_hand(tmp_path):
    (tmp_path / "ILSVRC2012_img_val.tar").touch()
    match = rf"by hand, from https.* In '{tmp_path}' there is no ILSVRC2012_img_train.tar;"
    with pytest.raises(SystemExit, match=match):
        prepare.main(["imagenet2012", f"--data_dir={tmp_path}", f"--manual_dir={tmp_path}"])


def test_prepare_names_the_data_sets_it_knows(capsys):
    with pytest.raises(SystemExit):
        prepare.main(["imagenet"])
    assert "invalid choice: 'imagenet' (choose from 'fashion_mnist'," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (
            ImportError("No module named 'tensorflow'"),
            r"needs TensorFlow, once \(pip install tensorflow\): No module",
        ),
        (FileNotFoundError("no labels.txt"), r"no labels.txt\n.*a clone of .*pip install -e"),
    ],
)
def test_prepare_says_what_is_missing(tmp_path, monkeypatch, error, match):
    def builder(*_, **__):
        raise error

    monkeypatch.setattr(tfds, "builder", builder)
    with pytest.raises(SystemExit, match=match):
        prepare.main(["places365_small", f"--data_dir={tmp_path}"])


def test_prepare_writes_array_record(tmp_path, monkeypatch):
    def builder(name, *, data_dir, file_format):
        assert file_format == "array_record"

        class Builder:
            def download_and_prepare(self, *, download_config):
                assert download_config.manual_dir == f"{tmp_path}/downloads/manual"
                prepared.write(data_dir, name, train=4, validation=2)

        return Builder()

    monkeypatch.setattr(tfds, "builder", builder)
    line = prepare.prepare("places365_small", str(tmp_path))
    assert line == f"places365_small in {tmp_path}: 100 classes, 4 in train, 2 in validation."


def bomb():
    """A bitmap that says that it is of 65,535 x 65,535 pixels."""
    content = prepared.encode(prepared.halves((4, 4)), "BMP").getvalue()
    return content[:18] + struct.pack("<ii", 65535, 65535) + content[26:]


def short_header():
    """A PNG whose header is too short, and has the right checksum."""
    chunk = b"IHDR" + bytes(5)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 5) + chunk + struct.pack(">I", crc32(chunk))


@pytest.mark.parametrize(
    ("image", "match"),
    [
        (b"no image", "cannot identify image"),
        (prepared.encode(prepared.halves((9, 9))).getvalue()[:-20], "image file is truncated"),
        (bomb(), "could be decompression bomb"),
        (short_header(), "Truncated IHDR chunk"),
    ],
)
def test_what_is_no_image_is_named(tmp_path, image, match):
    prepared.write(tmp_path, image=io.BytesIO(image), train=5)
    examples = records.open_records("imagenet2012", "train", str(tmp_path))
    match = f"Example 3 of the train split of imagenet2012 in '{tmp_path}' is damaged: .*{match}"
    with pytest.raises(UserError, match=match):
        examples.read([3, 4])


def test_a_record_that_is_damaged_is_refused_when_it_is_read(tmp_path):
    prepared.write(tmp_path, train=3)
    rewrite(tmp_path, "*train*", lambda b: b[:600] + bytes([b[600] ^ 1]) + b[601:])
    examples = records.open_records("imagenet2012", "train", str(tmp_path))
    match = (
        r"Of the examples \[0, 1, 2\] of the train split of imagenet2012 .* cannot be read: .*hash"
    )
    with pytest.raises(UserError, match=match):
        examples.read([0, 1, 2])


# TensorFlow Datasets writes -1 as it is, and refuses what is beyond its 100 classes.
@pytest.mark.parametrize(("first_label", "num_classes", "wrong"), [(-1, 100, -1), (97, 99, 99)])
def test_a_label_that_is_no_class_is_named(tmp_path, first_label, num_classes, wrong):
    prepared.write(tmp_path, first_label=first_label, train=3)
    rewrite(tmp_path, "features.json", lambda b: b.replace(b'"100"', b'"%d"' % num_classes))
    examples = records.open_records("imagenet2012", "train", str(tmp_path))
    found = map(examples.features.deserialize_example_np, examples.source)
    [index] = [i for i, example in enumerate(found) if example["label"] == wrong]
    match = (
        f"Example {index} of the train split of imagenet2012 in '{tmp_path}' has the label {wrong},"
        f" and must have one from 0 to {num_classes - 1}"
    )
    with pytest.raises(UserError, match=match):
        examples.read(range(3))


CLASSES = tfds.features.ClassLabel(num_classes=9)


@pytest.mark.parametrize(
    "features",
    [
        {"label": CLASSES},
        {"image": prepared.IMAGE},
        {"image": prepared.IMAGE, "label": tfds.features.Text()},
        {"image": prepared.IMAGE, "label": tfds.features.Sequence(CLASSES)},
        {"image": prepared.IMAGE, "label": tfds.features.ClassLabel()},
        {"image": tfds.features.Tensor(shape=(4, 4, 3), dtype=np.uint8), "label": CLASSES},
        {"image": tfds.features.Image(shape=(4, 4, 4), encoding_format="png"), "label": CLASSES},
        {"image": tfds.features.Image(dtype=np.uint16, encoding_format="png"), "label": CLASSES},
    ],
)
def test_a_data_set_of_other_features_is_refused(tmp_path, features):
    prepared.write(tmp_path, train=3)
    tfds.features.FeaturesDict(features).save_config(tmp_path / "imagenet2012" / "5.1.0")
    match = (
        f"imagenet2012 in '{tmp_path}' must have the features image, .*, got {next(iter(features))}"
    )
    with pytest.raises(UserError, match=match):
        records.open_records("imagenet2012", "train", str(tmp_path))


def test_another_data_set_in_the_folder_of_one_is_refused(tmp_path):
    prepared.write(tmp_path, "fashion_mnist", train=3)
    (tmp_path / "fashion_mnist").rename(tmp_path / "imagenet2012")
    match = f"The imagenet2012 in '{tmp_path}' is not what its folder says: it is fashion_mnist"
    with pytest.raises(UserError, match=match):
        records.open_records("imagenet2012", "train", str(tmp_path))


def test_a_data_set_without_examples_is_refused(tmp_path):
    prepared.write(tmp_path, train=3)
    rewrite(tmp_path, "dataset_info.json", lambda b: b.replace(b'"3"', b'"0"'))
    with pytest.raises(UserError, match="has no examples in its split 'train'"):
        records.open_records("imagenet2012", "train", str(tmp_path))


@pytest.mark.parametrize(
    "data_dir", ["file", "loop", "~no-such-user", "/" + "x" * 300, "far://away"]
)
def test_what_is_no_folder_of_data_sets_is_refused(tmp_path, monkeypatch, data_dir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=f"imagenet2012 in '{data_dir}'"):
        records.open_records("imagenet2012", "train", data_dir)


def test_data_sets_and_shards_may_be_linked(tmp_path):
    prepared.write(tmp_path / "disk", train=3)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "imagenet2012").symlink_to(tmp_path / "disk" / "imagenet2012")
    (shard,) = tmp_path.glob("disk/*/*/*train*")
    shard.rename(tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    examples = records.open_records("imagenet2012", "train", str(tmp_path / "data"))
    assert sorted(label for _, label in examples.read(range(3))) == [0, 1, 2]
    (tmp_path / "shard").unlink()
    with pytest.raises(UserError, match=f"{shard.name} cannot be read: .*No such file"):
        records.open_records("imagenet2012", "train", str(tmp_path / "data"))


@pytest.mark.parametrize("package", ["tensorflow_datasets", "array_record.python"])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, package):
    prepared.write(tmp_path, train=3)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"need what requirements/train.txt names: .*{package}"):
        records.open_records("imagenet2012", "train", str(tmp_path))

import io

import numpy as np
import PIL.Image
import pytest
import tensorflow_datasets as tfds

from experiments.mistakes import UserError
from experiments.vit import prepare, records
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
    command = rf"python -m experiments.vit.prepare imagenet2012 --data_dir={tmp_path}$"
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


def test_what_is_no_image_is_named(tmp_path):
    prepared.write(tmp_path, image=io.BytesIO(b"no image"), train=5)
    examples = records.open_records("imagenet2012", "train", str(tmp_path))
    match = r"Example 3 of the train split of imagenet2012 in .* is damaged: cannot identify image"
    with pytest.raises(UserError, match=match):
        examples.read([3, 4])

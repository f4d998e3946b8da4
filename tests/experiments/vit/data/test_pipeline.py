import multiprocessing
import os
import signal

import numpy as np
import pytest

from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.data import in_memory, pipeline, records, stream
from experiments.vit.tools import evaluate
from tests.experiments.vit import prepared, tiny
from tests.standard_errors import assert_mean

AUGMENTED = {
    "augment__crop_area": 0.05,
    "augment__flip": True,
    "augment__randaugment_layers": 2,
    "augment__randaugment_magnitude": 10.0,
    "augment__mixup": 0.2,
}
NUM_TRAIN, NUM_TEST = 36, 21
WINDOWS = pytest.mark.parametrize("window", [0, 6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    prepared.write(path, train=NUM_TRAIN, validation=NUM_TEST)
    return path


def assert_equal(batch, expected):
    assert batch.keys() == expected.keys()
    for name, x in batch.items():
        np.testing.assert_array_equal(x, expected[name])


def concatenated(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.fast
@pytest.mark.parametrize("name", records.DATASETS)
def test_every_data_set_is_read_by_its_own_features(tmp_path, name):
    test_split = records.DATASETS[name].test_split
    prepared.write(tmp_path, name, train=9, **{test_split: 5})
    inputs = prepared.load(tmp_path, dataset=name)
    channels = 1 if name == "fashion_mnist" else 3
    assert inputs[:4] == (channels, 100, 9, 5)
    batch = inputs.train_batch(0)
    assert batch["image"].shape == (8, 16, 16, channels)
    assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int32)
    np.testing.assert_allclose(batch["image"][:, :, :5], 40 / 127.5 - 1, atol=1e-6)
    np.testing.assert_allclose(batch["image"][:, :, -5:], 210 / 127.5 - 1, atol=1e-6)


@pytest.mark.fast
def test_batches_are_a_function_of_seed_and_step(folder):
    first, again, other = (prepared.load(folder, seed=s, **AUGMENTED) for s in (0, 0, 1))
    for step in (7, 3):
        assert_equal(first.train_batch(step), again.train_batch(step))
    assert (first.train_batch(3)["label"] != other.train_batch(3)["label"]).any()
    assert (first.train_batch(3)["label"] != first.train_batch(7)["label"]).any()


@pytest.mark.fast
def test_every_epoch_is_a_new_order_of_all_images(folder):
    inputs = prepared.load(folder)
    labels = np.concatenate([inputs.train_batch(step)["label"] for step in range(9)])
    epochs = labels.reshape(2, NUM_TRAIN)  # The fifth batch has images of both.
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_TRAIN))
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.fast
@WINDOWS
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_read_disjoint_shards_of_the_batches_of_one(folder, hosts, window):
    changes = AUGMENTED | {"shuffle_window": window}
    one = prepared.load(folder, **changes)
    shards = [prepared.load(folder, host, hosts, **changes) for host in range(hosts)]
    for step in (0, 4):
        parts = [shard.train_batch(step) for shard in shards]
        assert {len(part["label"]) for part in parts} == {8 // hosts}
        assert_equal(concatenated(parts), one.train_batch(step))
    plain = [prepared.load(folder, host, hosts, batch_size=12) for host in range(hosts)]
    epochs = [{*np.concatenate([p.train_batch(s)["label"] for s in range(3)])} for p in plain]
    assert sum(map(len, epochs)) == len(set.union(*epochs)) == NUM_TRAIN


@pytest.mark.fast
@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("eval_batch_size", [4, 16, 64])
def test_evaluation_sees_every_image_once_on_all_hosts_together(folder, hosts, eval_batch_size):
    found = [
        list(prepared.load(folder, host, hosts, eval_batch_size).eval_batches())
        for host in range(hosts)
    ]
    assert {len(batches) for batches in found} == {-(-NUM_TEST // eval_batch_size)}
    batches = [batch for batches in found for batch in batches]
    assert {x.shape[0] for b in batches for x in b.values()} == {eval_batch_size // hosts}
    seen = concatenated(batches)
    assert seen["weight"].sum() == NUM_TEST
    assert sorted(seen["label"][seen["weight"] == 1]) == list(range(NUM_TEST))


@pytest.mark.fast
def test_images_in_memory_are_shared_by_hosts_like_records():
    config = tiny.get_config(batch_size=32, augment__mixup=0.3)
    one, *shards = (
        pipeline.load(config, eval_batch_size=100, rows=prepared.rows(*host))
        for host in ((0, 1), (0, 2), (1, 2))
    )
    parts = concatenated([shard.train_batch(5) for shard in shards])
    assert_equal(parts, one.train_batch(5))
    assert parts["label"].shape == (32, 10)
    config.augment.mixup = 0.0
    plain = pipeline.load(config, eval_batch_size=100).train_batch(5)
    split = in_memory.load_digits("").train
    expected = in_memory.train_batches(split, batch_size=32, seed=0, shift=0.5, flip=False)[5]
    assert_equal(plain, expected)
    evaluated = concatenated([b for shard in shards for b in shard.eval_batches()])
    assert len(evaluated["label"]) == 400
    assert evaluated["weight"].sum() == one.num_test == 360


def take(batches, n):
    return [next(batches) for _ in range(n)]


@pytest.mark.slow
@WINDOWS
def test_workers_and_a_resume_in_the_middle_of_an_epoch_change_no_bit(folder, window):
    changes = AUGMENTED | {"shuffle_window": window}
    inputs = prepared.load(folder, **changes)
    expected = [inputs.train_batch(step) for step in range(7)]
    shared = prepared.load(folder, num_workers=2, **changes)
    assert shared.num_parts == (2 if window else 1)
    with stream.Batches(
        shared.train_part, num_steps=7, num_workers=2, num_parts=shared.num_parts
    ) as batches:
        before = take(batches, 3)
        state = batches.get_state()
        after = list(batches)
    with stream.Batches(inputs.train_batch, num_steps=7, num_workers=0) as batches:
        take(batches, 1)
        batches.set_state(state)
        resumed = list(batches)
        assert batches.get_state() == {"step": 7}
    assert len(after) == len(resumed) == 4
    for found, wanted in zip(before + after + resumed, expected + expected[3:], strict=True):
        assert_equal(found, wanted)


@pytest.mark.slow
def test_workers_make_the_batches_of_images_in_memory():
    config = tiny.get_config(num_workers=2, augment__mixup=0.3)
    inputs = pipeline.load(config, eval_batch_size=100)
    with stream.Batches(inputs.train_part, num_steps=4, num_workers=2) as batches:
        for step, batch in enumerate(batches):
            assert_equal(batch, inputs.train_batch(step))
    assert step == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_outlive_a_notice_to_them_and_end_with_the_run(number):
    def make(step):
        return {"step": np.array(step)}

    before = set(multiprocessing.active_children())
    with stream.Batches(make, num_steps=9, num_workers=1) as batches:
        next(batches)
        [worker] = set(multiprocessing.active_children()) - before
        os.kill(worker.pid, number)
        assert [int(batch["step"]) for batch in batches] == list(range(1, 9))
    worker.join(timeout=10)
    assert not worker.is_alive()


@pytest.mark.fast
def test_a_run_that_is_done_has_no_more_batches_and_none_beyond_are_resumed():
    with stream.Batches(lambda step: {"step": np.array(step)}, num_steps=4, num_workers=0) as b:
        b.set_state({"step": 4})
        assert list(b) == []
        with pytest.raises(ValueError, match="a step from 0 to 4, got 5"):
            b.set_state({"step": 5})


@pytest.mark.fast
def test_batches_are_skipped_also_after_a_resume():
    def make(number):
        return {"number": np.array([number])}

    def numbers(batches):
        return [int(batch["number"][0]) for batch in batches]

    with stream.Batches(make, num_steps=6, num_workers=0) as batches:
        take(batches, 1)
        batches.skip(range(2, 4))
        assert numbers(take(batches, 2)) == [1, 4]
        state = batches.get_state()
        assert numbers(batches) == [5, 6, 7]
    with stream.Batches(make, num_steps=6, num_workers=0, num_parts=1) as batches:
        batches.set_state(state)
        assert batches.skipped == range(2, 4)
        assert numbers(batches) == [5, 6, 7]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_label_that_is_no_class_comes_out_of_the_workers(tmp_path, num_workers):
    prepared.write(tmp_path, first_label=-1, train=9, validation=3)
    inputs = prepared.load(tmp_path)
    batches = stream.Batches(inputs.train_batch, num_steps=4, num_workers=num_workers)
    match = r"Example \d of the train split of imagenet2012 in .* has the label -1"
    with batches, pytest.raises(UserError, match=match):
        list(batches)
    with pytest.raises(UserError, match=r"the validation split of .* has the label -1"):
        list(inputs.eval_batches())


@pytest.mark.fast
def test_half_of_the_images_are_mirrored(folder):
    inputs = prepared.load(folder, augment__flip=True, batch_size=400)
    mirrored = inputs.train_batch(0)["image"][:, 8, 0, 0] > 0
    assert_mean(mirrored.astype(float), 0.5)


@pytest.mark.fast
def test_crops_are_resized_to_the_size_of_the_model(folder):
    inputs = prepared.load(folder, augment__crop_area=0.05, batch_size=400)
    images = inputs.train_batch(0)["image"]
    bright = (images[:, 8, :, 0] > 0).mean(axis=1)
    assert_mean(bright, 0.5)
    assert {0.0, 1.0} < {*bright}  # Small crops miss a half.


@pytest.mark.fast
def test_mixup_mixes_neighbors_and_keeps_the_mass_of_labels(folder):
    inputs = prepared.load(folder, augment__mixup=0.4, batch_size=200)
    plain = prepared.load(folder, batch_size=200).train_batch(0)
    mixed = inputs.train_batch(0)
    assert mixed["label"].dtype == np.float32
    np.testing.assert_allclose(mixed["label"].sum(axis=1), 1, rtol=1e-6)
    assert (mixed["label"].argmax(axis=1) == plain["label"]).all()
    own = mixed["label"].max(axis=1)
    rows = np.arange(200)
    different = plain["label"] != plain["label"][rows ^ 1]
    others = mixed["label"][rows, plain["label"][rows ^ 1]]
    np.testing.assert_allclose(others[different], 1 - own[different], atol=1e-6)
    # E max(x, 1 - x) of a Beta(0.4, 0.4).
    draws = np.random.default_rng(0).beta(0.4, 0.4, 10**6)
    assert_mean(own[different], np.maximum(draws, 1 - draws).mean())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hosts": 8}, "a multiple of twice the devices .* mixup takes images in pairs, got 8"),
        ({"hosts": 2, "batch_size": 6}, "a multiple of twice the devices .*, got 6"),
    ],
)
def test_mixtures_that_hosts_would_have_to_share_are_refused(folder, changes, match):
    with pytest.raises(UserError, match=match):
        prepared.load(folder, augment__mixup=0.1, **changes)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_workers": 3}, "num_workers must be at most 2, the number of lanes that this host"),
        ({"batch_size": 400}, "must be 0 with fewer examples than the 100 lanes .*6 for 36 exam"),
    ],
)
def test_lanes_that_cannot_be_filled_or_shared_are_refused(folder, changes, match):
    with pytest.raises(UserError, match=match):
        prepared.load(folder, shuffle_window=6, **changes)


@pytest.mark.fast
@WINDOWS
def test_what_is_held_out_is_the_end_of_the_training_split(folder, window):
    every = records.open_records("imagenet2012", "train", str(folder))
    order = [label for _, label in every.read(range(NUM_TRAIN))]
    inputs = prepared.load(folder, held_out=0.1, shuffle_window=window)
    assert (inputs.num_train, inputs.num_held_out, inputs.num_test) == (32, 4, NUM_TEST)
    held_out = concatenated(list(inputs.held_out_batches()))
    assert held_out["label"][held_out["weight"] == 1].tolist() == order[-4:]
    trained = np.concatenate([inputs.train_batch(step)["label"] for step in range(4)])
    assert sorted(trained) == sorted(order[:-4])


@pytest.mark.fast
def test_images_in_memory_are_held_out_like_records():
    every, some = (
        pipeline.load(tiny.get_config(held_out=share), eval_batch_size=100) for share in (0, 0.01)
    )
    assert every.num_train == 1437
    assert every.held_out_batches is None
    assert (some.num_train, some.num_held_out, some.num_test) == (1422, 15, 360)
    held_out = concatenated(list(some.held_out_batches()))
    assert held_out["weight"].sum() == 15
    train = in_memory.load("digits", "").train
    images = held_out["image"][held_out["weight"] == 1]
    np.testing.assert_allclose(images, train.images[-15:] * 2 - 1, atol=1e-6)


@pytest.mark.fast
def test_some_image_must_be_left_to_train_on(folder):
    some = pipeline.load(tiny.get_config(held_out=0.999), eval_batch_size=100)
    assert (some.num_train, some.num_held_out) == (1, 1436)
    refused = "config.held_out must leave at least one of the {} training images of {}, got 0.9999"
    with pytest.raises(UserError, match=refused.format(1437, "digits")):
        pipeline.load(tiny.get_config(held_out=0.9999), eval_batch_size=100)
    with pytest.raises(UserError, match=refused.format(NUM_TRAIN, "imagenet2012")):
        prepared.load(folder, held_out=0.9999)


@pytest.mark.fast
def test_a_test_split_alone_can_be_opened(tmp_path):
    prepared.write(tmp_path, validation=NUM_TEST)
    config = prepared.get_config(tmp_path)
    test = pipeline.load_test(config, eval_batch_size=8)
    assert (test.channels, test.num_classes, test.num_test) == (3, 100, NUM_TEST)
    assert sum(batch["weight"].sum() for batch in test.eval_batches()) == NUM_TEST


@pytest.mark.fast
def test_images_in_memory_of_another_size_are_refused():
    config = tiny.get_config(image_size=16)
    with pytest.raises(UserError, match=r"image_size must be 8, as the images of digits are 8 x"):
        pipeline.load(config, eval_batch_size=8)


@pytest.mark.slow
@pytest.mark.devices(2)
def test_a_run_from_records_trains_and_is_evaluated_on_other_devices(folder, tmp_path):
    config = prepared.get_config(
        folder,
        model__patch_size=8,
        model__attention="exact",
        mesh__data=2,
        num_workers=1,
        checkpoint__interval=4,
        **AUGMENTED,
    )
    results = train.train(config, tmp_path / "run")
    assert (results["num_train"], results["num_test"]) == (NUM_TRAIN, NUM_TEST)
    found = evaluate.evaluate(tmp_path / "run", best=False, data_dir=str(folder), batch_size=16)
    assert found["test_loss"] == pytest.approx(results["test_loss"], rel=1e-5)

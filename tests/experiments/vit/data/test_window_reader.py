import dataclasses
import itertools
import pickle
from concurrent import futures

import pytest

from experiments.harness.mistakes import UserError
from experiments.vit.data import records, shuffle
from experiments.vit.data.window_reader import Blocks, WindowReader, _Window
from tests.experiments.vit import prepared
from tests.experiments.vit.data.test_records import rewrite

pytestmark = pytest.mark.fast
NUM, LANES = 40, 2
BATCH = LANES * shuffle.LANE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    prepared.write(path, train=NUM)
    return path


@pytest.fixture
def examples(folder):
    """The examples as if they were in two files, of which the split does not have the ends."""
    found = records.open_records("imagenet2012", "train", str(folder))
    [(path, _, stop)] = found.files
    files = records.File(path, 3, 20), records.File(path, 22, stop)
    return dataclasses.replace(found, files=files)


def reader(examples):
    starts = shuffle.blocks([stop - start for _, start, stop in examples.files], size=4)
    return WindowReader(examples, shuffle.Windows(0, LANES, 8, starts))


def labels(reader, positions):
    return [label for _, label in reader.read(positions)]


def test_examples_are_those_of_the_files(examples):
    every = [label for _, label in examples.read(range(NUM))]
    blocks = Blocks(examples)
    for (start, stop), expected in {(0, 17): every[3:20], (19, 25): every[24:30]}.items():
        assert [examples.decode(0, r)[1] for r in blocks.read(start, stop)] == expected


def test_an_epoch_has_every_example_once(examples):
    found = labels(reader(examples), range(32))  # Of 35 examples; the lanes have 17 each.
    assert len({*found}) == 32


def test_records_come_with_the_numbers_of_their_examples(examples):
    blocks = Blocks(examples)
    window = _Window(reader(examples)._windows, 1, 0)
    with futures.ThreadPoolExecutor(1) as pool:
        window.start(window.num_blocks, pool, blocks)
        for offset in range(len(window)):
            number, record = window.example(offset)
            assert [record] == blocks.read(number, number + 1)


def test_any_order_of_the_steps_and_a_copy_give_the_same(examples):
    one = reader(examples)
    expected = {step: labels(one, range(step * BATCH, (step + 1) * BATCH)) for step in range(12)}
    copy = pickle.loads(pickle.dumps(one))
    for step in (9, 2, 11, 0, 1, 2):
        assert labels(copy, range(step * BATCH, (step + 1) * BATCH)) == expected[step]


def test_a_lane_holds_two_windows_and_reads_ahead(examples):
    one, asked = reader(examples), []
    for step in range(12):
        one.read(range(step * BATCH, (step + 1) * BATCH))
        asked.append(
            {
                (lane, number): len(window._blocks)
                for lane, held in one._held.items()
                for number, window in held.items()
            }
        )
        for lane, held in one._held.items():
            assert len(held) in (2, 3)
            current = max(held) - 1
            assert step == 0 or asked[-2][lane, current] == held[current].num_blocks
    for lane in range(LANES):  # Not all at once.
        pairs = list(itertools.pairwise(asked))
        assert any(a[key] < b[key] for a, b in pairs for key in {*a} & {*b} if key[0] == lane)


def test_a_block_that_is_damaged_is_named(tmp_path):
    prepared.write(tmp_path, train=NUM)
    rewrite(tmp_path, "*train*", lambda b: b[:600] + bytes([b[600] ^ 1]) + b[601:])
    examples = records.open_records("imagenet2012", "train", str(tmp_path))
    match = r"Of the examples \d+ to \d+ of the train split of imagenet2012 .* read in .*: .*hash"
    with pytest.raises(UserError, match=match):
        reader(examples).read(range(4 * BATCH))


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    prepared.write(tmp_path, train=NUM)
    examples = records.open_records("imagenet2012", "train", str(tmp_path))
    one = reader(examples)
    one.read(range(BATCH))
    rewrite(tmp_path, "*train*", lambda b: b"")
    match = r"some cannot be read in .*train.array_record-00000-of-00001: a record is empty"
    with pytest.raises(UserError, match=match):
        one.read(range(BATCH, 4 * BATCH))

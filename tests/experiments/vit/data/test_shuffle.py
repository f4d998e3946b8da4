import numpy as np
import pytest

from experiments.vit.data import shuffle

pytestmark = pytest.mark.fast
# Three lanes, and files that blocks do not fill; an epoch leaves out up to two examples.
FILES = [53, 20, 41]
LANES, WINDOW = 3, 12


def windows(seed=0):
    return shuffle.Windows(seed, LANES, WINDOW, shuffle.blocks(FILES, size=5))


def examples(windows, positions):
    found = []
    for position in positions:
        lane, number, offset = windows.place(position)
        every = [i for piece in windows.pieces(lane, number) for i in range(*piece)]
        found.append(every[windows.shuffled(lane, number)[offset]])
    return found


def of_epoch(windows, epoch):
    """Returns the examples of each lane in an epoch, by the positions of its rows."""
    size = windows.lanes * shuffle.LANE
    count = range(epoch * windows.length, (epoch + 1) * windows.length)
    return [
        examples(
            windows,
            [n // shuffle.LANE * size + lane * shuffle.LANE + n % shuffle.LANE for n in count],
        )
        for lane in range(windows.lanes)
    ]


def test_blocks_are_of_one_file_and_about_one_size():
    starts = shuffle.blocks(FILES, size=5)
    assert {0, 53, 73, 114} <= {*starts}
    assert {*np.diff(starts)} == {4, 5}


@pytest.mark.parametrize("epoch", range(3))
def test_no_example_comes_twice_in_an_epoch_and_few_are_left_out(epoch):
    found = of_epoch(windows(), epoch)
    assert [len(lane) for lane in found] == [114 // LANES] * LANES
    assert len({*np.ravel(found)}) == 114 // LANES * LANES
    assert min(np.ravel(found)) >= 0
    assert max(np.ravel(found)) < 114


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [of_epoch(windows(seed), epoch)[0] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 3  # Blocks change their lanes.


def test_a_window_has_whole_blocks_but_where_it_is_cut():
    ours = windows()
    starts = {*ours.starts}
    for lane in range(LANES):
        for number in range(2 * ours.per_epoch):
            pieces = ours.pieces(lane, number)
            assert WINDOW - 3 <= sum(stop - start for start, stop in pieces) <= WINDOW + 3
            for start, stop in pieces[1:-1]:
                assert {start, stop} <= starts
            for start, stop in pieces:
                assert not any(start < cut < stop for cut in starts)


def test_a_window_is_shuffled_evenly():
    ours = windows()
    first = [
        ours.shuffled(lane, n)[0] / len(ours.shuffled(lane, n)) for lane, n in np.ndindex(3, 400)
    ]
    error = np.std(first) / len(first) ** 0.5
    size = len(ours.shuffled(0, 0))
    assert abs(np.mean(first) - (size - 1) / 2 / size) < 5 * error


def test_a_lane_without_a_whole_window_has_one():
    small = shuffle.Windows(0, LANES, 1000, shuffle.blocks(FILES))
    assert small.per_epoch == 1
    assert sum(stop - start for start, stop in small.pieces(1, 0)) == 38

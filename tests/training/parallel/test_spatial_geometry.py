"""The positions of an axis in each part, the exchange between parts; parts of files are read."""

import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from parsl_freetrain import BadInput
from parsl_freetrain.training.parallel.spatial import (
    AvgPool3d,
    Axis,
    Conv3d,
    ConvTranspose3d,
    Grid,
    MaxPool3d,
    Sharded,
    ShardedVolumes,
    check_division,
)
from parsl_freetrain.training.parallel.spatial.geometry import (
    Bounds,
    TransposedWindow,
    Window,
    moves,
    placed,
    split,
)
from tests.support.properties import holds_for

WINDOWS = st.builds(
    Window, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2)
)
SPREADS = st.builds(
    TransposedWindow, st.integers(1, 4), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2)
)


def positions(reach: Window, bounds: Bounds, out: Bounds) -> list[list[int]]:
    """What each part has after the exchange, as positions; padding lies beyond the axis."""
    found = moves(reach, bounds, out, 'depth')
    made = []
    for part, move in enumerate(found):
        own = list(range(bounds[part], bounds[part + 1]))
        left = list(range(bounds[part - 1], bounds[part])) if part else []
        before = left[slice(*found[part - 1].send[1])] if part else []
        after = (
            list(range(bounds[part + 1], bounds[part + 2]))[slice(*found[part + 1].send[0])]
            if part + 1 < len(found)
            else []
        )
        assert (len(before), len(after)) == move.receive
        inside = before + own[slice(*move.keep)] + after
        need = range(*reach.need(out[part], out[part + 1]))
        made.append(
            [n for n in need if n < 0][: move.pad[0]]
            + inside
            + [n for n in need if n >= bounds[-1]][: move.pad[1]]
        )
    return made


@holds_for(
    st.one_of(WINDOWS, SPREADS), st.lists(st.integers(1, 9), min_size=1, max_size=5), tries=150
)
def test_every_part_has_what_its_output_needs(reach: Window, sizes: list[int]) -> None:
    bounds = (0, *(sum(sizes[: i + 1]) for i in range(len(sizes))))
    try:
        out = placed(reach, bounds, 'depth')
        made = positions(reach, bounds, out)
    except BadInput:
        assume(False)
    assert (out[0], out[-1]) == (0, reach.extent(bounds[-1]))
    assert all(a < b for a, b in pairwise(out))
    assert made == [list(range(*reach.need(*part))) for part in pairwise(out)]


def test_parts_are_as_equal_as_can_be() -> None:
    assert split(17, 4, 'depth') == (0, 5, 9, 13, 17)
    said = 'The height of 3 cannot be divided into 4 parts: it can into up to 3'
    with pytest.raises(BadInput, match=said):
        split(3, 4, 'height')


def test_what_cannot_be_divided_is_one_sentence() -> None:
    for reach, bounds, words in (
        (
            Window(7, 1, 3),
            range(0, 9, 2),
            'needs 3 positions beyond part 0 of a depth of 8.*1 or 2',
        ),
        (Window(2, 2), range(7), 'makes 3 positions of a depth of 6 .*leaves a part without any:'),
        (Window(9), (0, 2, 4), 'makes 0 positions.*too small, undivided as well'),
    ):
        with pytest.raises(BadInput, match=words):
            moves(reach, tuple(bounds), placed(reach, tuple(bounds), 'depth'), 'depth')


class _Deep(nn.Module):
    """Three convolutions with a pool behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Conv3d(1 if i == 0 else 2, 2, 3, padding=1) for i in range(3)])

    def forward(self, x: Sharded) -> Sharded:
        for layer in self.layers:
            x = MaxPool3d(2)(layer(x))
        return x


def test_a_network_is_checked_before_anything_runs() -> None:
    check_division(_Deep(), 1, (32, 32, 32), (4, 2, 1))
    said = r'16x16x16 cannot be divided into 4x1x1 parts .* at the finest 2x1x1: .*window.*depth'
    with pytest.raises(BadInput, match=said):
        check_division(_Deep(), 1, (16, 16, 16), (4, 1, 1))
    with pytest.raises(BadInput, match='no division of them'):
        check_division(_Deep(), 1, (4, 4, 4), (2, 1, 1))


def test_options_that_are_not_there_are_refused() -> None:
    for make, words in (
        (lambda: Conv3d(1, 1, 3, padding='same'), "padding='same'.*as numbers"),
        (lambda: Conv3d(1, 1, 3, padding=1, padding_mode='circular'), "padding_mode='circular'"),
        (lambda: MaxPool3d(2, ceil_mode=True), 'no ceil_mode and no return_indices'),
        (lambda: AvgPool3d(2, count_include_pad=False), 'count_include_pad at True'),
    ):
        assert callable(make)
        with pytest.raises(BadInput, match=words):
            make()


def test_a_transposed_convolution_that_cannot_have_an_extent_says_so() -> None:
    small = Sharded.of(torch.zeros(1, 1, 3, 3, 3), (3, 3, 3), Grid())
    like = Sharded.of(torch.zeros(1, 1, 8, 6, 6), (8, 6, 6), Grid())
    with pytest.raises(BadInput, match='makes 6 to 7 positions of 3, and was asked for 8'):
        ConvTranspose3d(1, 1, 2, stride=2)(small, like=like)
    said = 'was given a part of 3x3x3 voxels; of 4x3x3 in 1x1x1 parts its own has 4x3x3'
    with pytest.raises(BadInput, match=said):
        Sharded.of(small.local, (4, 3, 3), Grid())


def grid(depth: Axis, height: Axis) -> Grid:
    return Grid((depth, height, Axis()))


@pytest.fixture(scope='module')
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('volumes') / 'volumes.npy'
    np.save(path, np.arange(2 * 3 * 7 * 6 * 5, dtype=np.float32).reshape(2, 3, 7, 6, 5))
    return path


def test_the_parts_are_the_whole(volumes: Path) -> None:
    whole = torch.from_numpy(np.load(volumes))
    for sample in range(2):
        rows = [
            torch.cat(
                [ShardedVolumes(volumes, grid(Axis(3, i), Axis(2, j)))[sample] for j in range(2)], 2
            )
            for i in range(3)
        ]
        assert torch.equal(torch.cat(rows, 1), whole[sample])
    assert len(ShardedVolumes(volumes, Grid())) == 2


def test_crops(volumes: Path) -> None:
    whole = torch.from_numpy(np.load(volumes))
    crops = [
        ShardedVolumes(
            volumes,
            grid(Axis(2, i), Axis()),
            extents=(5, 4, 3),
            corners=[(1, 2, 1, 2), (0, 0, 0, 0)],
        )
        for i in range(2)
    ]
    assert torch.equal(torch.cat([crop[0] for crop in crops], 1), whole[1, :, 2:7, 1:5, 2:5])
    assert [crop[1].shape[1] for crop in crops] == [3, 2]


def resident(path: Path) -> int:
    """Bytes of a file that this process has touched through its mappings, as Linux counts them."""
    total, ours = 0, False
    for line in Path('/proc/self/smaps').read_text().splitlines():
        if re.match(r'[0-9a-f]+-[0-9a-f]+ ', line):
            ours = line.endswith(str(path))
        elif ours and line.startswith('Rss:'):
            total += int(line.split()[1]) * 1024
    return total


def test_only_the_own_part_is_read(tmp_path: Path) -> None:
    path = tmp_path / 'large.npy'
    array = np.lib.format.open_memmap(
        path, mode='w+', dtype=np.float32, shape=(1, 1, 256, 128, 256)
    )  # 32 MiB, zeros on no disk
    array.flush()
    del array
    part = ShardedVolumes(path, grid(Axis(8, 3), Axis()))
    before = resident(path)
    assert part[0].shape == (1, 32, 128, 256)
    read = resident(path) - before
    # The kernel maps some pages around those that are asked for.
    assert os.path.getsize(path) / 8 <= read < 1.1 * os.path.getsize(path) / 8


def several_arrays(path: Path) -> None:
    with path.open('wb') as file:
        np.savez(file, np.zeros((1, 1, 9, 9, 9)))


def test_bad_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    bad = tmp_path / 'bad.npy'
    unreadable = 'cannot be read as an array'
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: None, unreadable),
        (bad.touch, unreadable),
        (lambda: bad.write_text('no array'), unreadable),
        (lambda: several_arrays(bad), unreadable),
        (lambda: np.save(bad, np.array([{}]), allow_pickle=True), unreadable),
        (lambda: np.save(bad, np.zeros((3, 3))), r'shape \(3, 3\); it must have 5 dimensions'),
        (lambda: np.save(bad, np.zeros((1, 1, 2, 9, 9))), 'depth of 2 cannot be divided into 3'),
    ]
    for make, words in cases:
        make()
        with pytest.raises(BadInput, match=words):
            ShardedVolumes(bad, grid(Axis(3, 0), Axis()))


def test_a_crop_beyond_the_array_is_refused(volumes: Path) -> None:
    with pytest.raises(BadInput, match=r'5x4x3 voxels from \(3, 1, 2\) of sample 1 on goes beyond'):
        ShardedVolumes(volumes, Grid(), extents=(5, 4, 3), corners=[(1, 3, 1, 2)])

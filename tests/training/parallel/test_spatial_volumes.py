"""Each rank reads its part of a file of volumes, and no more."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from parsl_freetrain import BadInput
from parsl_freetrain.training.parallel.spatial import Axis, Grid, ShardedVolumes


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

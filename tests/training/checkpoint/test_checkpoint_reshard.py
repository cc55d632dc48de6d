"""What was written by any number of ranks is read by any other number, each its own part."""

import itertools
from pathlib import Path

import pytest
import torch

from parsl_freetrain import FreeTrainError
from parsl_freetrain.training.checkpoint import block_digests as hashing
from parsl_freetrain.training.checkpoint import manifest
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.parts import (
    Contents,
    part_of,
    read_part,
    write_contents,
    write_part,
)
from parsl_freetrain.training.checkpoint.source import PartReader
from parsl_freetrain.training.checkpoint.transport import Disk
from tests.support.damage import flip

SHAPES = {'rows': (13, 5), 'cube': (6, 7, 4), 'bias': (9,), 'number': (), 'none': (0, 3)}
BLOCK = 100


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within rows."""
    monkeypatch.setattr(hashing, 'BLOCK', BLOCK)


def whole() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def boxes(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A tensor cut into this number of parts in each dimension, as torch's chunk cuts."""
    cuts = []
    for length, number in zip(shape, (*parts, 1, 1, 1), strict=False):
        each = -(-length // number)
        cuts.append([(at, min(each, length - at)) for at in range(0, max(length, 1), max(each, 1))])
    return [
        Box(shape, tuple(at for at, _ in cut), tuple(size for _, size in cut))
        for cut in itertools.product(*cuts)
    ]


def written(folder: Path, writers: int, parts: tuple[int, ...] = (2, 2)) -> dict[str, torch.Tensor]:
    """A committed checkpoint by this number of writers, which share the parts in turn."""
    full = whole()
    shares: list[dict[str, tuple[torch.Tensor, Box]]] = [{} for _ in range(writers)]
    for name, tensor in full.items():
        for number, box in enumerate(boxes(SHAPES[name], parts if writers > 1 else ())):
            view = Box.whole(box.shape).inside(tensor, box)
            assert name not in shares[number % writers]
            shares[number % writers][name] = view, box
    found = []
    for rank, share in enumerate(shares):
        tensors = {name: tensor for name, (tensor, _) in share.items()}
        placed = {name: box for name, (_, box) in share.items()}
        part = part_of(rank, tensors, placed, {'a': 1} if rank == 0 else None, folder=folder)
        if rank:
            part = read_part(folder, rank, write_part(folder, rank, part))
        found.append(part)
    hashed = write_contents(folder, found)
    manifest.write_manifest(folder, manifest.Manifest('t', 1, 1, {}), hashed)
    manifest.commit(folder)
    return full


def reader_of(folder: Path) -> tuple[PartReader, Disk]:
    contents = Contents.read(folder)
    disk = Disk(folder, contents.files)
    return PartReader(contents, disk), disk


@pytest.mark.parametrize('writers', [1, 4])
@pytest.mark.parametrize('parts', [(8,), (1, 3, 2)], ids=str)
def test_parts_are_read_whoever_wrote(tmp_path: Path, writers: int, parts: tuple[int, ...]) -> None:
    full = written(tmp_path, writers)
    assert {file.name for file in manifest.verify(tmp_path).files} >= {'rank-0.safetensors'}
    for name, tensor in full.items():
        for box in boxes(SHAPES[name], parts):
            found = reader_of(tmp_path)[0].read({name: box})[name]
            assert torch.equal(found, Box.whole(box.shape).inside(tensor, box)), (name, box)
    assert reader_of(tmp_path)[0].structure() == {'a': 1}


def test_a_reader_reads_the_rows_that_it_needs(tmp_path: Path) -> None:
    written(tmp_path, 1)
    reader, disk = reader_of(tmp_path)
    reader.read({'cube': Box((6, 7, 4), (2, 0, 0), (1, 7, 4))})
    assert 0 < disk.bytes_read <= 3 * BLOCK


def test_a_flipped_byte_is_found_by_who_reads_its_block_and_by_nobody_else(tmp_path: Path) -> None:
    full = written(tmp_path, 1)
    file = tmp_path / 'rank-0.safetensors'
    flip(file)
    reader = reader_of(tmp_path)[0]
    assert torch.equal(reader.whole('rows'), full['rows'])
    last = (file.stat().st_size - 1) // BLOCK
    names = [name for name in SHAPES if name not in ('rows', 'none')]
    with pytest.raises(
        manifest.Damaged, match=rf'block {last} of rank-0\.safetensors does not have'
    ):
        for name in names:
            reader.whole(name)
    with pytest.raises(manifest.Damaged, match=r'rank-0\.safetensors does not have the digest'):
        manifest.verify(tmp_path)


def test_parts_that_do_not_make_up_a_tensor_are_refused(tmp_path: Path) -> None:
    box = {'x': Box((4,), (0,), (2,))}
    half = part_of(0, {'x': torch.ones(2)}, box, {}, folder=tmp_path)
    with pytest.raises(FreeTrainError, match="written 2 of 4 elements of 'x', so the checkpoint"):
        write_contents(tmp_path, [half])


def test_a_table_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    part = part_of(1, {'x': torch.ones(2)}, {}, folder=tmp_path)
    digest = write_part(tmp_path, 1, part)
    assert read_part(tmp_path, 1, digest) == part
    (tmp_path / 'rank-1.json').write_bytes(b'{}')
    with pytest.raises(FreeTrainError, match=r'rank-1\.json is not what rank 1 wrote'):
        read_part(tmp_path, 1, digest)

"""A checkpoint is verified while it is read, and not read without need."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parsl_freetrain import Checkpoint, Retention
from parsl_freetrain.training.checkpoint import manifest
from parsl_freetrain.training.checkpoint.state import Position, collect, content_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import sort_out
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.loop.start import find_start
from parsl_freetrain.training.spec.fragment_order import RankPlace
from tests.support.damage import flip
from tests.support.ranks import order


@pytest.fixture
def store(tmp_path: Path) -> PosixCheckpointStore:
    return PosixCheckpointStore(tmp_path / 'store', 'digits')


def save(store: PosixCheckpointStore, samples: int) -> Checkpoint:
    torch.manual_seed(samples)
    model = nn.Linear(3, 2)
    prepared = sort_out((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    state = collect(content_of(prepared), Position(samples, 100, 7, 64, 8, 0))
    return store.save(state.write, samples=samples, fragment=1, metrics={})


@pytest.mark.parametrize('file', ['rank-0.safetensors', 'contents.json'])
def test_damage_is_found_while_reading(
    tmp_path: Path, store: PosixCheckpointStore, file: str
) -> None:
    before, newest = save(store, 8), save(store, 16)
    flip(path := Path(newest.path, file), path.stat().st_size // 2)
    latest, saved = find_start(order(tmp_path, 2), RankPlace(0, 1, 0, 1, ''), store, Peers())
    assert saved is not None
    assert (latest, saved.position.samples) == (before, 8)
    assert len(store.set_aside) == 1


def test_pruning_reads_the_newest_only_if_another_process_wrote_it(
    store: PosixCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    blocks_of = vars(manifest)['blocks_of']

    def counted(file: object) -> Any:
        read.append(str(file))
        return blocks_of(file)

    monkeypatch.setattr(manifest, 'blocks_of', counted)
    for samples in (8, 16, 24, 32):
        save(store, samples)
        store.prune(Retention(2))
    assert [checkpoint.samples for checkpoint in store.checkpoints()] == [24, 32]
    assert not read  # it was hashed while it was written
    another = PosixCheckpointStore(store.folder, 'digits')
    another.prune(Retention(2))
    assert not read  # nothing to remove
    (tensors := Path(store.checkpoints()[-1].path, 'rank-0.safetensors')).write_bytes(
        bytes(tensors.stat().st_size)
    )
    another.prune(Retention(1))
    assert read
    assert [checkpoint.samples for checkpoint in store.checkpoints()] == [24]


def test_pruning_notices_that_a_file_of_its_own_is_gone(store: PosixCheckpointStore) -> None:
    save(store, 8)
    Path(save(store, 16).path, 'rank-0.safetensors').unlink()
    store.prune(Retention(1))
    assert [checkpoint.samples for checkpoint in store.checkpoints()] == [8]

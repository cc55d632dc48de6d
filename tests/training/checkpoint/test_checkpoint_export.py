"""Weights out of checkpoints."""

import json
import stat
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parsl_freetrain import BadInput, Checkpoint, export_weights, load_weights
from parsl_freetrain.training.checkpoint.folder_claim import claim
from parsl_freetrain.training.checkpoint.part_reader import PartReader
from parsl_freetrain.training.checkpoint.state import Position, collect, content_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import Prepared
from tests.support.damage import flip
from tests.support.examples import equal


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.norm.register_buffer('phase', torch.tensor([1 + 2j]))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def get_extra_state(self) -> dict[str, Any]:
        return {'version': 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {'version': 3}


def saved(folder: Path, *models: nn.Module, samples: int = 10) -> Checkpoint:
    claim(folder, 'net', {'seed': 1}, 'auto')
    state = collect(content_of(Prepared(models)), Position(samples, 100, 0, 50, 10, 0))
    return PosixCheckpointStore(folder, 'net').save(
        state.write, samples=samples, fragment=1, metrics={}
    )


def test_weights_go_to_a_file_that_others_read(tmp_path: Path) -> None:
    model = Tied()
    checkpoint = saved(tmp_path / 'any name', model)
    fresh = Tied()
    fresh.load_state_dict(load_weights(checkpoint))
    for source in (checkpoint, checkpoint.path, Path(checkpoint.path), tmp_path / 'any name'):
        file = export_weights(source, tmp_path / 'net.safetensors')
        found = load_file(file)
        state = model.state_dict()
        assert equal(found, {k: v for k, v in state.items() if isinstance(v, torch.Tensor)})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ['any name', 'net.safetensors']


def test_several_files_have_an_index_and_one_tensor_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    checkpoint = saved(tmp_path / 't', model)
    alive: list[weakref.ref[torch.Tensor]] = []
    read = PartReader.whole

    def whole(reader: PartReader, name: str) -> torch.Tensor:
        assert sum(tensor() is not None for tensor in alive) <= 1
        found = read(reader, name)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(PartReader, 'whole', whole)
    index = export_weights(checkpoint, tmp_path / 'net.safetensors', shard_bytes=600)
    assert index == tmp_path / 'net.safetensors.index.json'
    told = json.loads(index.read_text())
    assert told['metadata']['total_size'] == 4 * (64 + 8) * 4
    files = sorted(set(told['weight_map'].values()))
    assert files == [f'net-{number:05d}-of-00002.safetensors' for number in (1, 2)]
    for name, expected in model.state_dict().items():
        assert torch.equal(load_file(tmp_path / told['weight_map'][name])[name], expected)


def test_the_newest_of_a_folder_counts_and_models_have_prefixes(tmp_path: Path) -> None:
    saved(tmp_path / 't', nn.Linear(1, 1))
    one, two = nn.Linear(2, 1), nn.Linear(3, 1)
    saved(tmp_path / 't', one, two, samples=20)
    weights = load_weights(tmp_path / 't')
    assert list(weights) == ['model.weight', 'model.bias', 'model_2.weight', 'model_2.bias']
    assert torch.equal(weights['model_2.weight'], two.weight)


def test_what_is_no_good_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = Path(saved(tmp_path / 't', nn.Linear(2, 1)).path)
    with pytest.raises(BadInput, match='is no checkpoint: name a checkpoint'):
        load_weights(tmp_path)
    with pytest.raises(BadInput, match='cannot be written to .*No such file'):
        export_weights(checkpoint, tmp_path / 'nowhere' / 'x.safetensors')
    flip(checkpoint / 'rank-0.safetensors')
    with pytest.raises(BadInput, match=r'is damaged \(rank-0.safetensors does not have the digest'):
        export_weights(checkpoint, tmp_path / 'x.safetensors')
    with pytest.raises(BadInput, match='holds no usable checkpoint'):
        load_weights(tmp_path / 't')
    assert not (tmp_path / 'x.safetensors').exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / 't', nn.Linear(2, 1))
    (tmp_path / 't').chmod(0o770)
    for source in (tmp_path / 't', checkpoint):
        with pytest.raises(BadInput, match='mode 0770'):
            load_weights(source)

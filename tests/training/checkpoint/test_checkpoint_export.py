"""Weights out of checkpoints. Of every file of a trainer's folder with every damage: no hang, no
wrong weight, a sentence.
"""

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parsl_freetrain import (
    BadInput,
    Checkpoint,
    FreeTrainError,
    Retention,
    export_weights,
    load_weights,
)
from parsl_freetrain.training.checkpoint.folder_claim import claim
from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.source import PartReader, read_state
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
    Tied().load_state_dict(load_weights(checkpoint))
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
    for best in (False, True):
        with pytest.raises(BadInput, match='is no checkpoint: name a checkpoint'):
            load_weights(tmp_path / 'another', best=best)
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


IDENTITY = {'seed': 1}


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        _remove(path)
        make(path)

    return damage


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f'/proc/self/fd/{here}/{path.name}')
    os.close(here)


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([(content or b'x')[middle] ^ 16]) + content[middle + 1 :]


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def _huge(path: Path) -> None:
    with path.open('ab') as file:
        file.truncate(1 << 40)


ANY = {
    'gone': _remove,
    'a pipe': _instead(os.mkfifo),
    'a socket': _instead(_socket),
    'a link to nothing': _instead(lambda path: path.symlink_to('/nonexistent/x')),
    'a link to itself': _instead(lambda path: path.symlink_to(path.name)),
}
OF_FILES = {
    **ANY,
    'cut': _changed(lambda content: content[: len(content) // 2]),
    'empty': _changed(lambda content: b''),
    'zeros': _changed(lambda content: bytes(len(content) or 9)),
    'a bit': _changed(_flipped),
    'noise': _changed(lambda content: os.urandom(max(64, len(content)))),
    'nested': _changed(lambda content: b'[' * 100_000),
    'a folder': _instead(lambda path: path.mkdir()),
    'a device': _instead(lambda path: path.symlink_to('/dev/zero')),
    'huge': _huge,
}
OF_FOLDERS = {**ANY, 'a file': _instead(Path.touch), 'emptied': _instead(Path.mkdir)}


def digest(weights: dict[str, torch.Tensor]) -> str:
    content = b''.join(weights[name].numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope='module')
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer's folder with two checkpoints."""
    folder = tmp_path_factory.mktemp('matrix') / 'aa'
    for samples in (10, 20):
        torch.manual_seed(samples)
        saved(folder, nn.Linear(3, 2), samples=samples)
    PosixCheckpointStore(folder, 'net').fence(1)
    return folder


def restart(folder: Path) -> str:
    """What a restart and its first checkpoint do with the folder."""
    found = claim(folder, 'net', IDENTITY, 'auto')
    store = PosixCheckpointStore(folder, 'net')
    store.fence(store.last_fragment() + 1)
    while (found := store.newest()) is not None:
        try:
            read_state(found.path)
            break
        except Damaged as damage:
            store.put_aside(Path(found.path), str(damage))
    store.prune(Retention(last=1))
    return 'nothing' if found is None else digest(load_weights(found))


def exported(folder: Path) -> str:
    return digest(load_file(export_weights(folder, folder.parent / 'weights')))


def paths(trainer: Path) -> list[Path]:
    newest = max(trainer.glob('ckpt-*'))
    return [
        path.relative_to(trainer)
        for path in sorted(trainer.rglob('*'))
        if not any(part.startswith('ckpt-') for part in path.relative_to(trainer).parts)
        or newest in (path, *path.parents)
    ]


def test_any_damage_costs_at_most_the_newest_checkpoint(trainer: Path, tmp_path: Path) -> None:
    good = {digest(load_weights(path)) for path in trainer.glob('ckpt-*')}
    wrong, tried = list[object](), 0
    for relative in paths(trainer):
        kinds = OF_FOLDERS if (trainer / relative).is_dir() else OF_FILES
        for kind, damage in kinds.items():
            for step in (lambda folder: digest(load_weights(folder)), exported, restart):
                folder, tried = tmp_path / 'aa', tried + 1
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(trainer, folder, symlinks=True)
                damage(folder / relative)
                try:
                    said = step(folder)
                except (BadInput, FreeTrainError) as error:
                    # Only what says whose folder it is, or what forbids late writers, stops it.
                    if relative.parts[0].startswith('ckpt-') or str(folder) not in str(error):
                        wrong.append((relative, kind, step, repr(error)))
                except BaseException as error:
                    wrong.append((relative, kind, step, repr(error)))
                else:
                    if said not in good:
                        wrong.append((relative, kind, step, said))
    assert not wrong
    assert tried > 150


@pytest.mark.parametrize(
    ('name', 'number'),
    [
        ('COMMITTED', errno.EIO),
        ('manifest.json', errno.ELOOP),
        ('rank-0.safetensors', errno.ENXIO),
        ('rank-0.safetensors', errno.ESTALE),
    ],
)
def test_a_file_that_cannot_be_read_is_damage_unless_the_moment_is_to_blame(
    trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    shutil.copytree(trainer, tmp_path / 'aa')
    opened, newest = os.open, max((tmp_path / 'aa').glob('ckpt-*'))

    def failing(path: Any, *args: Any, **more: Any) -> int:
        if not isinstance(path, int) and Path(path) == newest / name:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(os, 'open', failing)
    if number == errno.ESTALE:
        with pytest.raises(FreeTrainError, match='Stale.* none was set aside'):
            restart(tmp_path / 'aa')
    else:
        assert restart(tmp_path / 'aa') == digest(load_weights(min(trainer.glob('ckpt-*'))))


def test_a_pipe_in_place_of_the_trainers_file_names_the_cure(trainer: Path, tmp_path: Path) -> None:
    shutil.copytree(trainer, tmp_path / 'aa')
    ANY['a pipe'](tmp_path / 'aa' / 'trainer.json')
    with pytest.raises(BadInput, match=r"trainer.json cannot be understood .* resume='never' to"):
        claim(tmp_path / 'aa', 'net', IDENTITY, 'auto')
    claim(tmp_path / 'aa', 'net', IDENTITY, 'never')
    assert json.loads((tmp_path / 'aa' / 'trainer.json').read_text())['trainer'] == 'net'

"""Every file of a trainer's folder with every damage: no hang, no wrong weight, a sentence."""

import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parsl_freetrain import BadInput, FreeTrainError, Retention, export_weights, load_weights
from parsl_freetrain.training.checkpoint.folder_claim import claim
from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from tests.training.checkpoint.test_checkpoint_export import saved

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

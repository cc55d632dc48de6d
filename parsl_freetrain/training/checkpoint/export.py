"""Reading weights from checkpoints, for use without FreeTrain."""

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.host.files import sync_dir, write_new
from parsl_freetrain.training.checkpoint import manifest as manifests
from parsl_freetrain.training.checkpoint.flatten import same
from parsl_freetrain.training.checkpoint.identity import is_trainer_folder, refuse_open, trainer_of
from parsl_freetrain.training.checkpoint.safetensors_io import Piece, write_tensors
from parsl_freetrain.training.checkpoint.source import PartReader, read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.spec.retention import BEST, Retention


def load_weights(
    source: Checkpoint | str | os.PathLike[str], *, best: bool | Retention = False
) -> dict[str, torch.Tensor]:
    """The model's weights (parameters and buffers) in a checkpoint, on the CPU. The checkpoint is
    verified first. Raises BadInput if there is no checkpoint, it is damaged, or others may write to
    its folder. Returns what ``model.load_state_dict`` takes. If there are several models, names
    begin with 'model.', 'model_2.' and so on, and those of moving averages with 'ema.', 'ema_2.'
    and so on.

    Parameters
    ----------
    source
        A checkpoint, its directory, or a trainer's folder, of which the newest good checkpoint is
        taken.
    best
        Take the best checkpoint of the trainer instead: that with the smallest value given to
        ``ctx.checkpoint``, or, with the trainer's :class:`~parsl_freetrain.Retention`, as it says.
    """
    saved = read_state(str(_checkpoint_folder(source, best)))
    if len(of_models := saved.models or saved.own) == 1 and not saved.averages:
        return of_models[0]
    return {
        f'{kind}_{i}.{name}' if i > 1 else f'{kind}.{name}': value
        for kind, models in (('model', of_models), ('ema', saved.averages))
        for i, model in enumerate(models, 1)
        for name, value in model.items()
    }


def same_weights(
    one: Checkpoint | str | os.PathLike[str], other: Checkpoint | str | os.PathLike[str]
) -> bool:
    """Whether the models in two checkpoints are the same to the last bit."""
    return same(dict(load_weights(one)), dict(load_weights(other)))


def export_weights(
    source: Checkpoint | str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    shard_bytes: int | None = None,
    best: bool | Retention = False,
    adapter_only: bool = False,
) -> Path:
    """Write the model's weights in a checkpoint to a file in the safetensors format. An existing
    file is replaced atomically. One tensor at a time is in memory. Raises BadInput as
    :func:`load_weights`, and if a file cannot be written. Returns the file, the index, or the
    folder.

    Parameters
    ----------
    source, best
        As for :func:`load_weights`.
    file
        The file to write, for instance 'model.safetensors'; private (0600).
    shard_bytes
        Write several files of at most this number of bytes of tensors (a larger tensor has a file
        of its own), 'model-00001-of-00003.safetensors' and so on, and the index that Hugging Face's
        libraries read, 'model.safetensors.index.json'.
    adapter_only
        Of a model of PEFT, write what belongs to its adapters. ``file`` is then a folder, for
        ``PeftModel.from_pretrained``.
    """
    reader = PartReader.of(_checkpoint_folder(source, best))
    pieces = _pieces(reader)
    target = Path(file)
    try:
        if adapter_only:
            return _export_adapters(reader.structure()['rest'].get('adapters'), pieces, target)
        if shard_bytes is None:
            return _replace(target, lambda draft: write_tensors(draft, pieces))
        groups = _grouped(pieces, shard_bytes)
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = f'{target.stem}-{number:05d}-of-{len(groups):05d}{target.suffix}'
            _replace(target.with_name(name), partial(write_tensors, pieces=group))
            weight_map.update((piece.name, name) for piece in group)
        size = {'total_size': sum(piece.nbytes for piece in pieces)}
        index = {'metadata': size, 'weight_map': weight_map}
        content, beside = json.dumps(index, indent=2).encode(), f'{target.name}.index.json'
        return _replace(target.with_name(beside), lambda draft: write_new(draft, content))
    except OSError as error:
        raise BadInput(
            f'Weights cannot be written to {target} ({error.strerror}): name a file '
            'where you can write.'
        ) from error


def _export_adapters(adapters: Mapping[str, str] | None, pieces: list[Piece], target: Path) -> Path:
    """Write adapters as PEFT's ``save_pretrained`` does."""
    if not adapters:
        raise BadInput(
            'The checkpoint holds no adapters, since the model was none of PEFT: leave out '
            'adapter_only.'
        )
    for adapter, how in adapters.items():
        folder = target if adapter == 'default' else target / adapter
        folder.mkdir(parents=True, exist_ok=True)
        left_out = adapter, 'modules_to_save'
        own = [
            replace(piece, name='.'.join(one for one in parts if one not in left_out))
            for piece in pieces
            if adapter in (parts := piece.name.split('.'))
        ]
        _replace(folder / 'adapter_model.safetensors', partial(write_tensors, pieces=own))
        _replace(folder / 'adapter_config.json', partial(write_new, content=how.encode()))
    return target


def _pieces(reader: PartReader) -> list[Piece]:
    """The tensors of all models, by :func:`load_weights`' names, each read when it is written."""
    # This format has no place for what a module keeps besides tensors (get_extra_state).
    found = {
        path: name
        for name, path in reader.structure()['paths'].items()
        if len(path) == 2 and re.fullmatch(r'(model|ema)(_\d+)?', path[0])
    }
    alone = {model for model, _ in found} == {'model'}
    shapes = reader.shapes()
    called = {name: own if alone else f'{model}.{own}' for (model, own), name in found.items()}
    return [
        Piece(own, reader.dtype(name), shapes[name], partial(reader.whole, name))
        for name, own in called.items()
    ]


def _grouped(pieces: list[Piece], most: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    size = most
    for piece in pieces:
        if not groups or size + piece.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    return groups


def _replace(target: Path, write: Callable[[Path], object]) -> Path:
    draft = target.with_name(f'.{target.name}-{secrets.token_hex(8)}')
    try:
        write(draft)
        draft.replace(target)
        sync_dir(target.parent)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return target


def _checkpoint_folder(source: Checkpoint | str | os.PathLike[str], best: bool | Retention) -> Path:
    path = Path(source.path if isinstance(source, Checkpoint) else source)
    refuse_open(path)
    trainers = path if is_trainer_folder(path) else path.parent
    if best and (is_trainer_folder(trainers) or manifests.is_committed(path)):
        keep = best if isinstance(best, Retention) else Retention()
        found = keep.best_of(PosixCheckpointStore(trainers, trainer_of(trainers)).checkpoints())
        if found is None:
            raise BadInput(
                f'{trainers} holds no checkpoint with the metric {keep.best or BEST!r}, by which '
                "one is the best: say ctx.checkpoint(best=...), or best=Retention(best='name')."
            )
        path = Path(found.path)
    if is_trainer_folder(path):
        newest = PosixCheckpointStore(path, trainer_of(path)).latest()
        if newest is None:
            raise BadInput(f'{path} holds no usable checkpoint yet.')
        return Path(newest.path)
    if not manifests.is_committed(path):
        raise BadInput(
            f"{path} is no checkpoint: name a checkpoint's directory (ckpt-...) or a "
            "trainer's folder."
        )
    refuse_open(path.parent)
    try:
        manifests.verify(path)
    except manifests.SharedDamaged:
        raise
    except manifests.Damaged as damage:
        raise BadInput(f'Checkpoint {path} is damaged ({damage}): use the one before.') from damage
    return path

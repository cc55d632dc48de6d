"""Reading weights from checkpoints, for use without FreeTrain."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.host.files import sync_dir
from parsl_freetrain.training.checkpoint.identity import is_trainer_folder, refuse_open, trainer_of
from parsl_freetrain.training.checkpoint.manifest import Damaged, is_committed, verify
from parsl_freetrain.training.checkpoint.safetensors_io import Piece, write_tensors
from parsl_freetrain.training.checkpoint.state import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore


def load_weights(source: Checkpoint | str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The model's weights (parameters and buffers) in a checkpoint, on the CPU. The checkpoint is
    verified first.

    Parameters
    ----------
    source
        A checkpoint, its directory, or a trainer's folder, of which the newest good checkpoint is
        taken.

    Returns
    -------
    dict
        What ``model.load_state_dict`` takes. If there are several models, names begin with
        'model.', 'model_2.' and so on, and those of moving averages with 'ema.', 'ema_2.' and so
        on.

    Raises
    ------
    BadInput
        If there is no checkpoint, it is damaged, or others may write to its folder.
    """
    folder = _checkpoint_folder(Path(source.path if isinstance(source, Checkpoint) else source))
    saved = read_state(str(folder))
    if len(saved.models) == 1 and not saved.averages:
        return saved.models[0]
    return {
        f'{kind}_{i}.{name}' if i > 1 else f'{kind}.{name}': value
        for kind, models in (('model', saved.models), ('ema', saved.averages))
        for i, model in enumerate(models, 1)
        for name, value in model.items()
    }


def same_weights(
    one: Checkpoint | str | os.PathLike[str], other: Checkpoint | str | os.PathLike[str]
) -> bool:
    """Whether the models in two checkpoints are the same to the last bit. Both are given as for
    :func:`load_weights`.

    Raises
    ------
    BadInput
        As :func:`load_weights`.
    """
    first, second = load_weights(one), load_weights(other)
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def export_weights(
    source: Checkpoint | str | os.PathLike[str], file: str | os.PathLike[str]
) -> Path:
    """Write the model's weights in a checkpoint to a file in the safetensors format. An existing
    file is replaced atomically.

    Parameters
    ----------
    source
        As for :func:`load_weights`.
    file
        The file to write, for instance 'model.safetensors'; private (0600).

    Returns
    -------
    Path
        The file.

    Raises
    ------
    BadInput
        As :func:`load_weights`; and if the file cannot be written.
    """
    # This format has no place for what a module keeps besides tensors (get_extra_state).
    weights = {
        name: value
        for name, value in load_weights(source).items()
        if isinstance(value, torch.Tensor)
    }
    target = Path(file)
    draft = target.with_name(f'.{target.name}-{secrets.token_hex(8)}')
    try:
        write_tensors(draft, [_piece(name, tensor) for name, tensor in weights.items()])
        draft.replace(target)
        sync_dir(target.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise BadInput(
            f'Weights cannot be written to {target} ({error.strerror}): name a file '
            'where you can write.'
        ) from error
    return target


def _piece(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def _checkpoint_folder(path: Path) -> Path:
    refuse_open(path)
    if is_trainer_folder(path):
        newest = PosixCheckpointStore(path, trainer_of(path)).latest()
        if newest is None:
            raise BadInput(f'{path} holds no usable checkpoint yet.')
        return Path(newest.path)
    if not is_committed(path):
        raise BadInput(
            f"{path} is no checkpoint: name a checkpoint's directory (ckpt-...) or a "
            "trainer's folder."
        )
    refuse_open(path.parent)
    try:
        verify(path)
    except Damaged as damage:
        raise BadInput(f'Checkpoint {path} is damaged ({damage}): use the one before.') from damage
    return path

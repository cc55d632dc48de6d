"""Whether a trainer may use a checkpoint folder, and what it continues from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint import identity as ids
from parsl_freetrain.training.checkpoint.store import BAD, PosixCheckpointStore
from parsl_freetrain.training.spec.diloco import OUTER, ROUND_SAMPLES
from parsl_freetrain.training.spec.retention import Resume


def claim(
    folder: Path, trainer: str, identity: Mapping[str, ids.JSON], resume: Resume
) -> Checkpoint | None:
    """Check, before anything is submitted, that a trainer may use its own folder, made (0700) if
    need be. Returns the checkpoint to continue from. ``identity``: what must be the same;
    ``resume``: 'auto' (continue if there is one), 'require' or 'never' (what is there moves to
    ``old-<n>``). Fragment numbers continue in any case, so that no late process can commit. Raises
    BadInput if the folder is another's, not writable, no trainer's, or lacks a required checkpoint.
    """
    if resume == 'require' and not folder.is_dir():
        raise BadInput(
            f"Trainer {trainer!r}: resume is 'require', but there is no folder {folder}: "
            "name the one that it trained in, or use resume='auto'."
        )
    new = ids.prove_writable(folder, trainer)
    store = PosixCheckpointStore(folder, trainer)
    if resume == 'never' and ids.is_trainer_folder(folder):
        if last := store.last_fragment():
            store.fence(last + 1)
        ids.move_aside(folder)
    ids.record_or_compare(folder, trainer, identity)
    if new:
        return None
    try:
        found = store.latest(shared=False)  # the function may have what is in them
    except OSError as error:
        raise FreeTrainError(
            f'The checkpoints in {folder} cannot be read now ({error.strerror or error}); none was '
            'set aside: try again when the file system answers.'
        ) from error
    if found is None and resume == 'require':
        raise BadInput(
            f"Trainer {trainer!r}: resume is 'require', but {folder} holds no usable checkpoint "
            f'({len(store.set_aside)} damaged ones are kept in its folder {BAD!r}): '
            f"use resume='auto' to start from the beginning."
        )
    return found


def round_samples(folder: Path, training: str) -> int | None:
    """Number of samples in a round of a training in replicas, of its last one; None: not known."""
    last = PosixCheckpointStore(folder / OUTER, training).newest()
    return int(last.metrics.get(ROUND_SAMPLES, 0)) or None if last is not None else None

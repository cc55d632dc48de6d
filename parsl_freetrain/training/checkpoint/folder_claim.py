"""Whether a trainer may use a checkpoint folder, and what it continues from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint import identity as ids
from parsl_freetrain.training.checkpoint.store import BAD, PosixCheckpointStore
from parsl_freetrain.training.spec import diloco as rounds
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
    root = folder.parent.parent if folder.parent.name == rounds.REPLICAS else None
    if (
        root
        and resume == 'never'
        and not ids.is_trainer_folder(root)
        and (root / rounds.OUTER).is_dir()
    ):
        ids.move_aside(root)  # where a training has only other replicas than the first
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


class HasFolder(Protocol):
    @property
    def checkpoint_dir(self) -> str: ...


def stores_of(
    executors: Sequence[HasFolder], training: str, diloco: rounds.DiLoCo | None
) -> list[PosixCheckpointStore]:
    """Those of its replicas: with a transport in all folders in turn, else in the first."""
    apart = diloco is not None and diloco.transport is not None
    roots = [Path(e.checkpoint_dir) / training for e in executors[: None if apart else 1]]
    return [
        PosixCheckpointStore(
            rounds.replica_folder(roots[k % len(roots)], k), rounds.replica_name(training, k)
        )
        for k in range(diloco.replicas if diloco is not None else 1)
    ]


def all_handed_in(stores: Sequence[PosixCheckpointStore]) -> dict[tuple[int, int], str]:
    several = stores if len(stores) > 1 else ()  # one alone hands nothing in
    each = enumerate(store.handed_in() for store in several)
    return {(replica, at): told for replica, its in each for at, told in its.items()}


def round_samples(folder: Path, training: str) -> int | None:
    """Number of samples in a round of a training in replicas, of its last one; None: not known."""
    last = PosixCheckpointStore(folder / rounds.OUTER, training).newest()
    return int(last.metrics.get(rounds.ROUND_SAMPLES, 0)) or None if last is not None else None

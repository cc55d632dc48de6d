"""Saving and loading states by torch.distributed.checkpoint (DCP), which plans which rank writes
and reads what.

A state saved by any number of ranks can therefore be loaded by any other number. DCP's own storage
pickles its plan and everything that is not a tensor, and reading a pickle runs code;
:mod:`.folder_storage` has no pickles.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.folder_storage import FolderReader, FolderWriter

_SHOWN = 5


def save(folder: Path, state: Mapping[str, Any], *, group: ProcessGroup | None = None) -> None:
    """Save a flat dict of tensors and of values that ``torch.save`` takes into an empty folder.

    Parameters
    ----------
    folder
        A folder that all ranks see.
    state
        By name: tensors, DTensors (each rank writes its shard), and anything else that can be
        loaded with ``weights_only``.
    group
        The ranks that save together; all of them must call this. What all of them have is written
        by one of them. None: this rank saves alone and exchanges nothing.
    """
    _expect_no_group()
    with _as_it_was():
        dcp_save(
            dict(state),
            storage_writer=FolderWriter(folder),
            process_group=group,
            no_dist=group is None,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


def load(folder: Path, state: dict[str, Any], *, group: ProcessGroup | None = None) -> None:
    """Load into the tensors of a flat dict (of DTensors, each rank loads its shard). Other values
    are replaced. No code of the files is run.

    The number of ranks may differ from the number of ranks that saved.

    Raises
    ------
    BadInput
        If the tensors differ from the saved ones, or the format is another one.
    """
    reader = FolderReader(folder)
    here = {
        name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)
    }
    if faults := tensor_differences(reader.shapes(), here):
        raise BadInput(
            f'The tensors in checkpoint {folder} differ from those to load ({faults}): load '
            'what was saved.'
        )
    _expect_no_group()
    with _as_it_was():
        dcp_load(
            state,
            storage_reader=reader,
            process_group=group,
            no_dist=group is None,
            planner=_SafeLoadPlanner(),
        )


def load_all(folder: Path, prefix: str = '') -> dict[str, Any]:
    """Everything that was saved under names that begin with ``prefix``, complete and on the CPU.

    Raises
    ------
    BadInput
        If the format is another one.
    """
    reader = FolderReader(folder)
    state: dict[str, Any] = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix):
            state[name] = (
                torch.empty(saved.size, dtype=saved.properties.dtype)
                if isinstance(saved, TensorStorageMetadata)
                else None
            )
    _expect_no_group()
    with _as_it_was():
        dcp_load(state, storage_reader=reader, no_dist=True, planner=_SafeLoadPlanner())
    return state


def tensor_differences(
    there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]
) -> str:
    """The differences between the shapes in a checkpoint and those here: the first few by name, and
    the number of the others. Empty if there is none.
    """
    faults = [f'{name} is missing there' for name in here if name not in there]
    faults += [f'{name} is unknown here' for name in there if name not in here]
    faults += [
        f'{name} has shape {shape} there and {here[name]} here'
        for name, shape in there.items()
        if name in here and here[name] != shape
    ]
    more = f' and {len(faults) - _SHOWN} more' if len(faults) > _SHOWN else ''
    return '; '.join(faults[:_SHOWN]) + more


class _SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner would run the code of a pickle that it loads."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location='cpu', weights_only=True
        )


def _expect_no_group() -> None:
    # DCP warns whenever one rank saves alone, which is intended here.
    warnings.filterwarnings('ignore', 'torch.distributed is disabled', UserWarning)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Unwrap the error of the first rank that failed. DCP wraps errors into something that is not
    an Exception.
    """
    try:
        yield
    except CheckpointException as wrapped:
        raise wrapped.failures[min(wrapped.failures)][0] from None

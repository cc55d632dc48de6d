"""States saved and loaded by torch.distributed.checkpoint (DCP), which plans who writes and who reads what.

So what was saved by any number of ranks can be loaded by any other number. DCP's own storage keeps its plan, and everything else but
tensors, as pickles, which run code when they are read; :mod:`.folder_storage` does not.
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

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.training.folder_storage import FolderReader, FolderWriter

_SHOWN = 5


def save(folder: Path, state: Mapping[str, Any], *, group: ProcessGroup | None = None) -> None:
    """Save a flat dict of tensors and of what ``torch.save`` takes into an empty folder.

    Parameters
    ----------
    folder
        Where; all ranks see it.
    state
        By name: tensors, DTensors (of which every rank writes its shard), and anything else that can be loaded with ``weights_only``.
    group
        The ranks that save together, all of which must call this; what all of them have is written by one of them. None: this rank
        has everything and saves alone; nothing is exchanged then, so it cannot wait for anybody.
    """
    _expect_no_group()
    with _as_it_was():
        dcp_save(dict(state), storage_writer=FolderWriter(folder), process_group=group, no_dist=group is None,
                 planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))


def load(folder: Path, state: dict[str, Any], *, group: ProcessGroup | None = None) -> None:
    """Load into the tensors (and DTensors, each rank its shard) of a flat dict; other values are replaced. No code of the files is run.

    The number of ranks need not be that of the ranks that saved.

    Raises
    ------
    BadInput
        If the dict's tensors are not the saved ones, or the format is another one.
    """
    reader = FolderReader(folder)
    here = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    if faults := tensor_differences(reader.shapes(), here):
        raise BadInput(f'Checkpoint {folder} holds other tensors than are to be loaded ({faults}): load what was saved.')
    _expect_no_group()
    with _as_it_was():
        dcp_load(state, storage_reader=reader, process_group=group, no_dist=group is None, planner=_SafeLoadPlanner())


def load_all(folder: Path, prefix: str = '') -> dict[str, Any]:
    """All that was saved under names that begin with ``prefix``, whole and on the CPU.

    Raises
    ------
    BadInput
        If the format is another one.
    """
    reader = FolderReader(folder)
    state: dict[str, Any] = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix):
            state[name] = torch.empty(saved.size, dtype=saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else None
    _expect_no_group()
    with _as_it_was():
        dcp_load(state, storage_reader=reader, no_dist=True, planner=_SafeLoadPlanner())
    return state


def tensor_differences(there: Mapping[str, tuple[int, ...]], here: Mapping[str, tuple[int, ...]]) -> str:
    """What differs between the shapes in a checkpoint and those at hand, by name; the first few and how many more; '' if nothing."""
    faults = [f'{name} is missing there' for name in here if name not in there]
    faults += [f'{name} is unknown here' for name in there if name not in here]
    faults += [f'{name} has shape {shape} there and {here[name]} here' for name, shape in there.items()
               if name in here and here[name] != shape]
    more = f' and {len(faults) - _SHOWN} more' if len(faults) > _SHOWN else ''
    return '; '.join(faults[:_SHOWN]) + more


class _SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's own, which however runs the code of a pickle that it loads."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location='cpu', weights_only=True)


def _expect_no_group() -> None:
    # Said whenever one rank saves alone, which is what is wanted.
    warnings.filterwarnings('ignore', 'torch.distributed is disabled', UserWarning)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """DCP wraps what goes wrong into something that is no Exception; give back what did, of the first rank where it did."""
    try:
        yield
    except CheckpointException as wrapped:
        raise wrapped.failures[min(wrapped.failures)][0] from None

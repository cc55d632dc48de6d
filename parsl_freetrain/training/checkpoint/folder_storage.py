"""Storage for torch.distributed.checkpoint: safetensors files, and a JSON table of what is where.
Nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import write_new
from parsl_freetrain.training.checkpoint.safetensors_io import Piece, read_into, write_tensors

TABLE = 'tensors.json'
FORMAT = 1


class FolderWriter(StorageWriter):
    """Writes each rank's part to its own file, durably, and the table last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f'rank-{rank}') for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        tensors = {
            _piece_name(item): item for item in plan.items if item.type != WriteItemType.BYTE_IO
        }
        if tensors:
            file = f'{plan.storage_data}.safetensors'
            places = write_tensors(
                self._folder / file, [_piece(name, item, planner) for name, item in tensors.items()]
            )
            results += [
                WriteResult(item.index, places[name][1], [file, *places[name]])
                for name, item in tensors.items()
            ]
        for number, item in enumerate(
            item for item in plan.items if item.type == WriteItemType.BYTE_IO
        ):
            content = planner.resolve_data(item)
            assert isinstance(content, io.BytesIO)
            file = f'{plan.storage_data}-{number}.pt'
            write_new(self._folder / file, content.getvalue())
            results.append(
                WriteResult(item.index, len(content.getvalue()), [file, 0, len(content.getvalue())])
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for rank in results for result in rank}
        tensors, objects = {}, {}
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                tensors[name] = {
                    'dtype': str(saved.properties.dtype).removeprefix('torch.'),
                    'shape': list(saved.size),
                    'chunks': [
                        {
                            'offsets': list(chunk.offsets),
                            'sizes': list(chunk.sizes),
                            'at': stored[MetadataIndex(name, chunk.offsets)],
                        }
                        for chunk in saved.chunks
                    ],
                }
            else:
                objects[name] = {'at': stored[MetadataIndex(name)]}
        write_new(
            self._folder / TABLE,
            json.dumps(
                {'format': FORMAT, 'tensors': tensors, 'objects': objects}, indent=1
            ).encode(),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class FolderReader(StorageReader):
    """Reads what :class:`FolderWriter` wrote.

    Raises
    ------
    BadInput
        If the format is another one.
    FileNotFoundError
        If there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        table = json.loads((folder / TABLE).read_bytes())
        if table['format'] != FORMAT:
            raise BadInput(
                f'Checkpoint {folder} has state format {table["format"]}, and this version '
                f'reads format {FORMAT}: use the version that wrote it.'
            )
        saved: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._stored: dict[MetadataIndex, list[Any]] = {}
        for name, entry in table['tensors'].items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk['offsets']), torch.Size(chunk['sizes']))
                for chunk in entry['chunks']
            ]
            saved[name] = TensorStorageMetadata(
                TensorProperties(dtype=_dtype(entry['dtype'])), torch.Size(entry['shape']), chunks
            )
            self._stored.update(
                (MetadataIndex(name, chunk['offsets']), [*chunk['at'], torch.Size(chunk['sizes'])])
                for chunk in entry['chunks']
            )
        for name, entry in table['objects'].items():
            saved[name] = BytesStorageMetadata()
            self._stored[MetadataIndex(name)] = entry['at']
        self._metadata = Metadata(saved)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {
            name: tuple(saved.size)
            for name, saved in self._metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self._stored[item.storage_index][0], []).append(item)
        for name, items in files.items():
            with (self._folder / name).open('rb') as file:
                for item in sorted(items, key=lambda item: self._stored[item.storage_index][1]):
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, io.BytesIO(file.read()))
                    else:
                        self._read_tensor(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        _, start, _, sizes = self._stored[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        straight = (
            target.shape == sizes
            and target.device.type == 'cpu'
            and target.is_contiguous()
            and target.dtype == saved.properties.dtype
        )
        if straight:
            read_into(file, start, target)
        else:
            chunk = torch.empty(sizes, dtype=saved.properties.dtype)
            read_into(file, start, chunk)
            for dimension, (offset, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                chunk = chunk.narrow(dimension, offset, length)
            target.copy_(chunk)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _piece(name: str, item: WriteItem, planner: SavePlanner) -> Piece:
    def get() -> torch.Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    data = item.tensor_data
    assert data is not None
    return Piece(name, data.properties.dtype, tuple(data.chunk.sizes), get)


def _piece_name(item: WriteItem) -> str:
    data = item.tensor_data
    assert data is not None
    whole = data.chunk.sizes == data.size
    return item.index.fqn if whole else f'{item.index.fqn}@{",".join(map(str, data.chunk.offsets))}'


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BadInput(
            f'A checkpoint holds tensors of type {name!r}, which this version of torch '
            'does not know: use a newer one.'
        )
    return found

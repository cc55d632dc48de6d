"""Splitting nested states into named tensors and the rest, and joining them again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput

Path = tuple[Any, ...]


def take_apart(
    state: Mapping[str, Any], called: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a state of tensors, numbers, texts and containers (new ones are made) into its tensors,
    by names such as 'optimizer.state.0.exp_avg', and everything else, in a form that ``torch.load``
    with ``weights_only`` can read. ``called``: names of the entries for messages. Raises BadInput
    for anything else, which could not be loaded without running code of the file.
    """
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, Path] = {}

    def walk(value: Any, path: Path, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_quantized:
                return value.detach().clone()  # not a plain array, so it stays in the structure
            name = '.'.join(map(str, path))
            while name in tensors:  # {'a.b': ...} beside {'a': {'b': ...}}
                name += '+'
            tensors[name], paths[name] = value.detach(), path
            return None
        if (plain := _plain(value)) is not None or value is None:
            return plain
        if type(value) in (dict, OrderedDict, Counter):
            return type(value)(
                {
                    key: walk(item, (*path, key), f'{where}, entry {key!r}')
                    for key, item in value.items()
                }
            )
        if type(value) in (list, tuple):
            return type(value)([walk(item, (*path, i), where) for i, item in enumerate(value)])
        if type(value) is set and not any(isinstance(item, torch.Tensor) for item in value):
            return {walk(item, path, where) for item in value}
        raise BadInput(
            f'A checkpoint holds only tensors, numbers, texts and containers of them, but {where} '
            f'has a {type(value).__name__}: keep it out of the state, or convert it.'
        )

    rest = {key: walk(value, (key,), called.get(key, key)) for key, value in state.items()}
    return tensors, {'rest': rest, 'paths': paths}


def _plain(value: Any) -> Any:
    """A number, a text or a word of torch, of a type that can be loaded; None: it is none."""
    if isinstance(value, (bool, torch.dtype, torch.device, torch.Size)):
        return value
    plain: Any
    for plain in (int, float, str, bytes):
        if isinstance(value, plain):
            return plain(value)  # numpy's float64 is a float, but could not be loaded
    if hasattr(value, 'item') and getattr(value, 'shape', None) == ():
        return value.item()  # a number of numpy
    return None


def put_together(
    tensors: Mapping[str, torch.Tensor], structure: Mapping[str, Any]
) -> dict[str, Any]:
    """The state that :func:`take_apart` took apart."""
    at = {path: tensors[name] for name, path in structure['paths'].items()}

    def build(value: Any, path: Path) -> Any:
        if value is None:
            return at.get(path)
        if isinstance(value, dict):
            return type(value)({key: build(item, (*path, key)) for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)([build(item, (*path, i)) for i, item in enumerate(value)])
        return value

    return {key: build(value, (key,)) for key, value in structure['rest'].items()}

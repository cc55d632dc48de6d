"""Splitting nested states into named tensors and the rest, and joining them again."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import is_divided

Path = tuple[Any, ...]
_EXACT = {bool, int, float, str, bytes}
_CODE = (FunctionType, BuiltinFunctionType, type)
"""Some models keep what they were made with in their states; the names are saved."""


def take_apart(
    state: Mapping[str, Any], called: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A state's tensors by name, and the rest without code; BadInput, by names ``called``, for
    others.
    """
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, Path] = {}
    strides: dict[str, tuple[int, ...]] = {}
    kinds: dict[Path, tuple[str, Any, tuple[int, ...], tuple[int, ...]]] = {}
    code: dict[Path, str] = {}

    def walk(value: Any, path: Path, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            if hasattr(value, '__tensor_flatten__') and not is_divided(value):
                # Of a subclass that consists of plain tensors, as torch.compile takes it apart.
                names, how = value.__tensor_flatten__()
                parts = {name: getattr(value, name) for name in names}
                how = walk(how, path, where)
                kinds[path] = _name(type(value)), how, value.shape, value.stride()
                return walk(parts, path, where)
            if value.layout != torch.strided or value.is_quantized:
                return value.detach().clone()  # not a plain array, so it stays in the structure
            name = '.'.join(map(str, path))
            while name in tensors:  # {'a.b': ...} beside {'a': {'b': ...}}
                name += '+'
            tensors[name], paths[name] = value.detach(), path
            if not (is_divided(value) or value.is_contiguous()):
                dense = torch.empty_like(value, device='meta').stride() == value.stride()
                strides.update({name: value.stride()} if dense else {})  # for fused kernels
            return None
        if (plain := _plain(value)) is not None or value is None:
            return plain
        if isinstance(value, _CODE) and '<' not in (name := _name(value)):
            code[path] = name
            return None
        if type(value) in (dict, OrderedDict, Counter):
            items = value.items()
            return type(value)(
                {k: walk(item, (*path, k), f'{where}, entry {k!r}') for k, item in items}
            )
        if type(value) in (list, tuple):
            if _EXACT.issuperset(map(type, value)):  # it may be long
                return value[:]
            return type(value)([walk(item, (*path, i), where) for i, item in enumerate(value)])
        if type(value) is set and not any(isinstance(item, torch.Tensor) for item in value):
            return {walk(item, path, where) for item in value}
        raise BadInput(
            f'A checkpoint holds only tensors, numbers, texts and containers of them, but {where} '
            f'has a {type(value).__name__}: keep it out of the state, or convert it.'
        )

    rest = {key: walk(value, (key,), called.get(key, key)) for key, value in state.items()}
    return tensors, {'rest': rest, 'paths': paths, 'strides': strides, 'kinds': kinds, 'code': code}


def _name(value: Any) -> str:
    return f'{value.__module__}:{value.__qualname__}'


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
    strides, kinds, code = structure['strides'], structure['kinds'], structure['code']
    paths = structure['paths'].items()
    at = {path: _laid(tensors[name], strides.get(name)) for name, path in paths}

    def build(value: Any, path: Path, *, whole: bool = True) -> Any:
        if whole and path in kinds:
            kind, how, size, stride = kinds[path]
            parts = build(value, path, whole=False)
            return _found(kind).__tensor_unflatten__(parts, how, size, stride)
        if value is None:
            return _found(code[path]) if path in code else at.get(path)
        if isinstance(value, dict):
            return type(value)({key: build(item, (*path, key)) for key, item in value.items()})
        if type(value) in (list, tuple) and not _EXACT.issuperset(map(type, value)):
            return type(value)([build(item, (*path, i)) for i, item in enumerate(value)])
        return value

    return {key: build(value, (key,)) for key, value in structure['rest'].items()}


def _laid(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    if stride is None or len(stride) != tensor.dim():
        return tensor
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)


def _found(called: str) -> Any:
    """A function or class by its name: code of the environment, never of a file, not called."""
    module, name = called.split(':')
    with suppress(ImportError, AttributeError):
        found = attrgetter(name)(import_module(module))
        if isinstance(found, _CODE):
            return found
    raise BadInput(
        f'A checkpoint names {name} of {module}, which is not there: install the package, or '
        'define it in a module that ranks can import.'
    )


def same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)

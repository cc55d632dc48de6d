"""Types with bounds, and the sentence about a value that is not of a type."""

import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import EnumMeta
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from parsl_freetrain.core.model.errors import refuse

MAX = sys.float_info.max  # as a bound: neither infinite nor not a number

Number = Annotated[float, Meta(ge=-MAX, le=MAX, description='a finite number')]
NotNegative = Annotated[float, Meta(ge=0, le=MAX, description='a number, 0 or more')]
Positive = Annotated[float, Meta(gt=0, le=MAX, description='a number above 0')]
Share = Annotated[float, Meta(ge=0, le=1, description='a number from 0 to 1')]
Seconds = Annotated[float, Meta(ge=0, le=MAX, description='a number of seconds, 0 or more')]
SecondsOrNever = Annotated[float, Meta(ge=0, description='a number of seconds, 0 or more')]
PositiveSeconds = Annotated[float, Meta(gt=0, le=MAX, description='a number of seconds above 0')]
Count = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, description='a text that is not empty')]


@functools.cache
def hints_of(of: Callable[..., Any]) -> dict[str, Any]:
    """The types of a class's fields or a function's arguments, with their bounds."""
    return typing.get_type_hints(of, include_extras=True)


def check_fields(where: str, record: object) -> None:
    """Refuse a dataclass with a field beyond its bounds; the sentence begins with ``where``."""
    kind: Callable[..., Any] = type(record)
    for name, hint in hints_of(kind).items():
        if Annotated in (typing.get_origin(part) for part in (hint, *typing.get_args(hint))):
            check_value(f'{where}: {name}', getattr(record, name), hint)


class Wrong(NamedTuple):
    """What is wrong with a value: where in it, what is there, and what must be."""

    place: str
    value: object
    must: str


def check_value(what: str, value: object, hint: Any, *, read: bool = False) -> None:
    """Refuse a value not of a type or its ``Meta``. ``read`` from a file: lists are tuples."""
    if type(value) is not hint and (wrong := wrong_with(value, hint, read)):
        refuse(f'{what}{wrong.place}', wrong.value, wrong.must)


def wrong_with(value: object, hint: Any, read: bool = False) -> Wrong | None:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        wrong = wrong_with(value, of[0], read)
        if wrong and not wrong.place:
            return Wrong('', value, in_words(hint))
        if wrong is None and any(_is_beyond(value, meta) for meta in of[1:]):
            return Wrong('', value, _bounds_in_words(of[1]))
        return wrong
    if origin in _UNIONS:
        if any(wrong_with(value, part, read) is None for part in of):
            return None
        alike = [part for part in of if _is_kind(value, part, read)]
        found = wrong_with(value, alike[0], read) if len(alike) == 1 else None
        return found or Wrong('', value, in_words(hint))
    if not _is_kind(value, hint, read):
        return Wrong('', value, in_words(hint))
    for place, part, kind in _parts(value, origin, of):
        if wrong := wrong_with(part, kind, read):
            return wrong._replace(place=f'{place}{wrong.place}')
    return None


def _is_kind(value: object, hint: Any, read: bool) -> bool:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _is_kind(value, hint.__origin__, read)
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    kind = origin or hint
    if kind in (object, Any):
        return True
    if isinstance(value, bool):  # no number here, though Python counts with it
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    if read and kind is tuple:
        return isinstance(value, (list, tuple))
    if read and isinstance(kind, EnumMeta):
        return value in kind.__members__.values()
    if kind is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if isinstance(kind, type) and not getattr(kind, '_is_protocol', False):
        return isinstance(value, kind)
    import typeguard  # ranks rarely come here, and its import would delay their last checkpoint

    try:
        typeguard.check_type(value, hint)
    except typeguard.TypeCheckError:
        return False
    return True


def _parts(value: Any, origin: Any, of: tuple[Any, ...]) -> Iterator[tuple[str, object, Any]]:
    """What a list or dict holds: its place, itself, and the type that it must have."""
    if not isinstance(origin, type):
        return
    if issubclass(origin, Mapping):
        for name, found in value.items():
            yield f': the name {name!r}', name, of[0]
            yield f'[{name!r}]', found, of[1]
    elif issubclass(origin, (Sequence, Set)):
        each = of[:1] * len(value) if origin is not tuple or of[1:] == (...,) else of
        for i, (found, kind) in enumerate(zip(value, each, strict=True)):
            yield f'[{i}]', found, kind


def _is_beyond(value: Any, bounds: Meta) -> bool:
    return not (
        (bounds.ge is None or value >= bounds.ge)
        and (bounds.gt is None or value > bounds.gt)
        and (bounds.le is None or value <= bounds.le)
        and (bounds.lt is None or value < bounds.lt)
        and (bounds.min_length is None or len(value) >= bounds.min_length)
        and (bounds.max_length is None or len(value) <= bounds.max_length)
        and (bounds.pattern is None or re.search(bounds.pattern, value))
    )


_UNIONS = (typing.Union, types.UnionType)
_WORDS: dict[Any, str] = {
    float: 'a number',
    int: 'a whole number',
    str: 'a text',
    bool: 'True or False',
    type(None): 'None',
}


def in_words(hint: Any) -> str:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return of[1].description or f'{in_words(of[0])}, {_bounds_in_words(of[1])}'
    if origin in _UNIONS:
        return ' or '.join(in_words(part) for part in of)
    if origin is typing.Literal:
        return ' or '.join(map(repr, of))
    if origin in (list, tuple, Sequence):
        return f'a list (each {in_words(of[0])})'
    if origin in (dict, Mapping):
        return f'a dict (from {in_words(of[0])} to {in_words(of[1])})'
    if isinstance(hint, EnumMeta):
        return ' or '.join(map(repr, map(str, hint.__members__.values())))
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is None and isinstance(hint, type):
        return f'a {hint.__name__}'
    return str(hint).replace('typing.', '').replace('collections.abc.', '')


def _bounds_in_words(bounds: Meta) -> str:
    if bounds.description:
        return bounds.description
    if bounds.ge is not None and bounds.le is not None:
        return f'from {bounds.ge} to {bounds.le}'
    words = {'at least': bounds.ge, 'above': bounds.gt, 'at most': bounds.le, 'below': bounds.lt}
    if bounds.min_length:
        return f'of at least {bounds.min_length} item{"s" if bounds.min_length > 1 else ""}'
    return ' and '.join(f'{word} {bound}' for word, bound in words.items() if bound is not None)

"""Events and actions as JSON: each is one object, whose ``kind`` is the name of its class."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar('T')


def encode(items: Iterable[ev.Event | ev.Action]) -> str:
    """A JSON list of events or actions. Infinity is written as ``Infinity``, as Python reads it."""
    return json.dumps([_fields(item) for item in items], separators=(',', ':'))


def decode_events(text: str) -> tuple[ev.Event, ...]:
    """The events of :func:`encode`. Raises BadInput if the text is not a list of events."""
    return _decode(text, _event_classes(), 'event')


def decode_actions(text: str) -> tuple[ev.Action, ...]:
    """The actions of :func:`encode`; raises BadInput as :func:`decode_events`."""
    return _decode(text, _action_classes(), 'action')


def to_json(value: DataclassInstance) -> str:
    """A frozen dataclass as a JSON object."""
    return json.dumps(_fields(value), separators=(',', ':'))


def from_json(text: str, kind: type[T]) -> T:
    """A dataclass from the JSON object of :func:`to_json`; raises BadInput if it is not one."""
    try:
        return msgspec.convert(json.loads(text), kind)
    except ValueError as error:
        raise BadInput(f'{text[:200]!r} is not a record of {kind.__name__}: {error}.') from None


def _fields(value: object) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value, enc_hook=_plain)
    return fields


def _plain(value: Any) -> object:
    return value.item()  # a number of numpy or torch


def _decode(text: str, classes: dict[str, type[T]], what: str) -> tuple[T, ...]:
    try:
        return tuple(
            msgspec.convert(
                {name: value for name, value in record.items() if name != 'kind'},
                classes[record['kind']],
            )
            for record in json.loads(text)
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInput(f'{text[:200]!r} is not a list of {what}s: {error!r}.') from None


@cache
def _event_classes() -> dict[str, type[ev.Event]]:
    return {kind.__name__: kind for kind in ev.Event.__subclasses__()}


@cache
def _action_classes() -> dict[str, type[ev.Action]]:
    return {kind.__name__: kind for kind in get_args(ev.Action)}

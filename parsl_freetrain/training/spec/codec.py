"""Messages are JSON documents whose ``kind`` names the class; others are logged and dropped."""

from __future__ import annotations

import json
import logging
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)

_KINDS_LOGGED = 10  # per decoder, so that a sender cannot fill the log by inventing kinds
_KIND_CHARACTERS = 40

T = TypeVar('T')


def encode(message: Struct) -> bytes:
    """By Python's ``json``: msgspec refuses metrics that are not finite and names beyond UTF-8."""
    return json.dumps(msgspec.to_builtins(message, enc_hook=_as_float)).encode()


def _as_float(value: Any) -> float:
    if isinstance(value, float):  # numpy's float64, for instance
        return float(value)
    raise TypeError(f'{value!r} cannot be part of a message.')


class Decoder(Generic[T]):
    """Reads the messages of a channel: of the union ``kinds``. ``sender`` is named in the log."""

    def __init__(self, kinds: object, sender: str) -> None:
        self._kinds: Any = kinds
        self._sender = sender
        self._logged: set[str] = set()

    def decode(self, data: bytes) -> T | None:
        """None if it is not an expected message, which is logged once per kind."""
        document: object = None
        try:
            document = json.loads(data)
            message: T = msgspec.convert(document, self._kinds, str_keys=True)
        except Exception as error:  # no bytes may end their reader
            self._log_unknown(document, error)
            return None
        return message

    def _log_unknown(self, document: object, error: Exception) -> None:
        if isinstance(document, dict) and isinstance(document.get('message'), dict):
            document = document['message']
        found = document.get('kind') if isinstance(document, dict) else None
        kind = ascii(found)[:_KIND_CHARACTERS]
        if kind in self._logged or len(self._logged) >= _KINDS_LOGGED:
            return
        self._logged.add(kind)
        log.warning(
            'A message from %s was dropped (kind %s): %s; others of this kind are dropped '
            'without a word',
            self._sender,
            kind,
            ascii(str(error))[:200],
        )

"""Texts that ranks exchange through their store, safe from other users. Who reaches the port of a
TCPStore can list, read and overwrite its keys, so every text carries a code that only ranks of the
fragment can compute: their secret comes over the executor's encrypted channel.
"""

from __future__ import annotations

import hmac

from torch.distributed import Store  # type: ignore[attr-defined]

from parsl_freetrain.core.model.errors import FreeTrainError

_DIGEST = 'sha256'
_CODE_LENGTH = 64


class SealBroken(FreeTrainError):
    """A text in the store is not from a rank of this fragment."""


class SealedStore:
    """Sets and gets texts in the store of the ranks; the secret is unique to the fragment."""

    def __init__(self, store: Store, secret: str) -> None:
        self._store, self._secret = store, secret

    def clone(self) -> SealedStore:
        return SealedStore(self._store.clone(), self._secret)  # type: ignore[attr-defined]

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def set(self, key: str, text: str) -> None:
        self._store.set(key, self._code(key, text) + text)

    def get(self, key: str) -> str:
        """Wait for a text. Raises SealBroken if no rank of this fragment has set it."""
        found = bytes(self._store.get(key)).decode(errors='replace')
        code, text = found[:_CODE_LENGTH], found[_CODE_LENGTH:]
        if not hmac.compare_digest(code.encode(), self._code(key, text).encode()):
            raise SealBroken(
                f'The text {key!r} in the store of the ranks was not written by a rank of this '
                'fragment: another program has written to its port. Nothing of it is used.'
            )
        return text

    def _code(self, key: str, text: str) -> str:
        return hmac.new(self._secret.encode(), f'{key}\0{text}'.encode(), _DIGEST).hexdigest()

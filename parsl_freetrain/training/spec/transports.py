"""Ways between sites that have no file system in common, for what pieces of rounds hand in."""

import os
from functools import cache
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from msgspec import MsgspecError, convert, json, structs, to_builtins

from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.errors import BadInput, needs, refuse
from parsl_freetrain.host import files

BLOCK_BYTES = 64 * 2**20  # the most in one call of ``put``
ABSOLUTE = 'an absolute path on the nodes'


class Transport(Protocol):
    """Keeps blocks of bytes where the nodes of all sites reach them. Nothing in it is trusted: who
    gets a block knows its SHA-256 digest, from the checkpoint that names it. An object is sent to
    nodes as it is. Errors of the moment are any exceptions; what failed is tried again.
    """

    def put(self, name: str, content: bytes) -> str:
        """Keep a block, durably and whole or not at all. Returns the key by which all sites get it.
        The same name is given for the same content only; it may be put twice, and at once.
        """

    def get(self, key: str) -> bytes:
        """A block; LookupError if there is none of that key."""

    def remove(self, key: str) -> None:
        """Remove a block, if it is there."""


class Folder(Settings, frozen=True, kw_only=False, tag=True):
    """A folder that the nodes of all sites see, while each site has its own for checkpoints.

    Attributes
    ----------
    path
        An absolute path on the nodes, where ``~`` and variables of their environment, as in
        ``'$PROJECT/exchange'``, are replaced.
    """

    path: str

    def __post_init__(self) -> None:
        if not self.path.startswith(('/', '~', '$')):
            refuse('Folder: path', self.path, ABSOLUTE)

    def put(self, name: str, content: bytes) -> str:
        folder = self._folder()
        files.make_dir(folder)
        files.replace(folder / name, content)
        files.sync_dir(folder)
        return name

    def get(self, key: str) -> bytes:
        try:
            return files.read_regular(self._folder() / key, BLOCK_BYTES)
        except FileNotFoundError:
            raise LookupError(key) from None

    def remove(self, key: str) -> None:
        (self._folder() / key).unlink(missing_ok=True)

    def _folder(self) -> Path:
        found = Path(os.path.expandvars(self.path)).expanduser()
        if not found.is_absolute():
            refuse('Folder: path', str(found), f'{ABSOLUTE}, whose variables are set there')
        return found


class ProxyStoreTransport(Settings, frozen=True, kw_only=False, tag=True):
    """A transport by the connector of a ProxyStore store, made anew on the nodes: Redis, endpoints
    of several sites, transfers by Globus, or a connector of your own. Of the store nothing else is
    used, since it pickles what it keeps. Needs proxystore (the extra of that name).

    Attributes
    ----------
    store
        A ``proxystore.store.Store``. The attribute is its connector's kind and options.
    """

    store: Any

    def __post_init__(self) -> None:
        if not isinstance(self.store, tuple | list):  # as it is sent
            with needs('ProxyStoreTransport'):
                from proxystore.store import Store
            if not isinstance(self.store, Store):
                refuse('ProxyStoreTransport: store', self.store, 'a proxystore.store.Store')
            made = self.store.config().connector
            structs.force_setattr(self, 'store', (made.kind, to_builtins(made.options)))

    def __repr__(self) -> str:
        return f'ProxyStoreTransport({self.store[0]})'  # options may have a password

    def put(self, name: str, content: bytes) -> str:
        key, kind = self._connector().put(content), self._kind_of_keys()
        text = json.encode((kind.__name__, key)).decode()
        if self._key(text) != key:
            raise BadInput(
                f'{self}: its key {key!r} is not the same after JSON, as which checkpoints have '
                'it: use a connector whose keys have fields of strings and numbers.'
            )
        return text

    def get(self, key: str) -> bytes:
        found = self._connector().get(self._key(key))
        if found is None:
            raise LookupError(key)
        return bytes(found)

    def remove(self, key: str) -> None:
        self._connector().evict(self._key(key))

    def _key(self, text: str) -> Any:
        """A key from its name and fields. BadInput if this connector has none like that."""
        kind = self._kind_of_keys()
        try:
            name, fields = json.decode(text, type=tuple[str, list[Any]])
            if name == kind.__name__:
                return convert(fields, kind)
        except MsgspecError:
            pass
        raise BadInput(
            f'{self}: {text!r} is none of its keys, which are written as '
            f'["{kind.__name__}", [...]]: put the checkpoint back that names it, or use the '
            'connector with which it was made.'
        )

    def _kind_of_keys(self) -> Any:
        kind = get_type_hints(type(self._connector()).put).get('return')
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, '_fields')):
            refuse(f'{self}: what its put() returns', kind, 'annotated with a NamedTuple')
        return kind

    def _connector(self) -> Any:
        return _connector(self.store[0], json.encode(self.store[1]))


@cache
def _connector(kind: str, options: bytes) -> Any:
    with needs('ProxyStoreTransport'):
        from proxystore.store.config import ConnectorConfig
    return ConnectorConfig(kind=kind, options=json.decode(options)).get_connector()

"""Ranks write parts of a checkpoint beside training; if one is missing, nothing is committed."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.training.checkpoint.fault_hooks import saving
from parsl_freetrain.training.checkpoint.parts import Blocks, read_part, write_contents, write_part
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.comm.collectives import as_peer_loss
from parsl_freetrain.training.comm.peers import PeerLost, SealedStore

_POLL_S = (0.005, 0.1)
_LEAST_S = 60.0
_LOST = 10  # Divide the time limit by this once a rank is lost.
_SHOWN = 5
_REFUSED = 'refused: '


class PartWriters:
    """The ranks that write together; ``store``: for the thread (None: this one writes alone)."""

    def __init__(
        self,
        store: SealedStore | None,
        rank: int,
        world_size: int,
        folder: Path,
        limit_s: Callable[[], float],
    ) -> None:
        self._store, self._folder, self._limit_s = store, folder, limit_s
        self.rank, self._world_size = rank, world_size
        self._saves = 0
        self._until: float | None = None

    def begin(self) -> int:
        """The number of a save. All ranks call this at the same point of the training."""
        self._saves += 1
        return self._saves

    @property
    def alone(self) -> bool:
        return self._store is None

    def peer_lost(self, patience_s: float) -> float | None:
        """A rank is gone: wait no longer than others need. Seconds to the end (None: no wait)."""
        if self.alone:
            return None
        self._until = time.monotonic() + patience_s / _LOST
        return 2 * patience_s / _LOST

    def lead(self, save: int, folder: Path, state: State) -> Blocks:
        """Rank 0 writes its part and the contents; returns digests, FreeTrainError if one lacks."""
        self._set(f'{save}/folder', folder.name)
        saving('part-begun')
        parts = [state.part(self.rank, folder)]
        saving('part-data')
        saving('part-written')
        for rank, said in enumerate(self._reports(save), 1):
            if said.startswith(_REFUSED):
                raise FreeTrainError(
                    f'Rank {rank} could not write its part of checkpoint {folder} '
                    f'({said.removeprefix(_REFUSED)}); the one before is still there.'
                )
            parts.append(read_part(folder, rank, said))
        return write_contents(folder, parts)

    def follow(self, save: int, state: State) -> None:
        """Others write their parts once there is a folder; OSError, which rank 0 learns."""
        name = self._wait_for([f'{save}/folder'], None)
        if not name or name[0].startswith(_REFUSED):
            return  # rank 0 could not begin, and says why
        folder = self._folder / name[0]
        try:
            saving('begin')
            saving('part-begun')
            part = state.part(self.rank, folder)
            saving('part-data')
            self._set(f'{save}/{self.rank}', write_part(folder, self.rank, part))
        except Exception as error:
            self.refuse(save, error)
            raise
        saving('part-written')

    def refuse(self, save: int, error: BaseException) -> None:
        """Tell the others that this rank has no part to give; on rank 0: that nothing is saved."""
        with suppress(PeerLost):
            why = getattr(error, 'strerror', None) or str(error)
            self._set(f'{save}/{self.rank or "folder"}', f'{_REFUSED}{why}')

    def _reports(self, save: int) -> list[str]:
        """Of each other rank, the digest of what its part consists of, or why there is none."""
        keys = [f'{save}/{rank}' for rank in range(1, self._world_size)]
        found = self._wait_for(keys, time.monotonic() + max(self._limit_s(), _LEAST_S))
        if not found and keys:
            missing = [key.split('/')[1] for key in keys if not self._check([key])]
            more = f' and {len(missing) - _SHOWN} more' if len(missing) > _SHOWN else ''
            raise FreeTrainError(
                f'Ranks {", ".join(missing[:_SHOWN])}{more} have not written their parts of a '
                f'checkpoint in {self._folder}; the one before is still there.'
            )
        return found

    def _wait_for(self, keys: list[str], until: float | None) -> list[str]:
        """The values of keys, once all are set; none if that takes too long."""
        pause_s, longest_s = _POLL_S
        while not self._check(keys):
            ends = [end for end in (until, self._until) if end is not None]
            if ends and time.monotonic() > min(ends):
                return []
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        if self._store is None:
            return []
        with as_peer_loss():
            return [self._store.text(f'save/{key}') for key in keys]

    def _check(self, keys: list[str]) -> bool:
        if self._store is None:
            return True
        with as_peer_loss():
            return self._store.check([f'save/{key}' for key in keys])

    def _set(self, key: str, text: str) -> None:
        if self._store is not None:
            with as_peer_loss():
                self._store.set(f'save/{key}', text)

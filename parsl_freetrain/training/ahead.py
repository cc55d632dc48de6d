"""A rank that runs ahead: started for the next fragment while the one before still trains, it waits at what depends on the fragment."""

from __future__ import annotations

import os
import select
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.context import FragmentContext
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace
from parsl_freetrain.training.warm_request import launch_of

_LARGEST_REQUEST = 1_000_000


class Berth:
    """Where a rank waits for its fragment.

    Parameters
    ----------
    sock
        To the warm parent. The rank's channel has the same one; when somebody launches the fragment, it becomes the connection to them.
    asker
        Whoever asked to run ahead; is told when this rank waits.
    wait_s
        A rank that nobody wants for so many seconds ends.
    """

    def __init__(self, sock: socket.socket, asker: Channel, wait_s: float) -> None:
        self._sock = sock
        self._asker = asker
        self._wait_s = wait_s

    def wait(self) -> tuple[FragmentOrder, RankPlace]:
        """Wait for the fragment; ends the process where none comes."""
        self._asker.send({'kind': 'waits'}, wait=False)
        self._asker.close()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        request = b''
        fds: list[int] = []
        if poll.poll(self._wait_s * 1000):
            with suppress(OSError):
                request, fds, _, _ = socket.recv_fds(self._sock, _LARGEST_REQUEST, 1)
        if not fds:
            os._exit(0)
        os.dup2(fds[0], self._sock.fileno(), inheritable=False)
        os.close(fds[0])
        return launch_of(request)


class AheadContext(FragmentContext):
    """The context of a rank that runs ahead: whatever depends on the fragment is waited for when it is first asked for.

    Parameters
    ----------
    trainer, device
        What is known before, as in :class:`~parsl_freetrain.training.context.FragmentContext`.
    arrive
        Waits for the fragment, and gives what the context is made of.
    """

    def __init__(self, trainer: str, device: torch.device, arrive: Callable[[], tuple[Any, ...]]) -> None:
        self.__dict__.update(trainer=trainer, device=device, _arrive=arrive)

    def __getattr__(self, name: str) -> Any:   # asked only for what is not there yet
        if not self.arrive():
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.arrive()
        super().__setattr__(name, value)

    def arrive(self) -> bool:
        """Wait for the fragment, if that has not been done; whether it was done now."""
        arrive = self.__dict__.pop('_arrive', None)
        if arrive is None:
            return False
        super().__init__(*arrive())
        self.__dict__['_begun'] = True
        return True

    def began(self) -> bool:
        """Wait for the fragment where that has not been done; False if it has failed to begin."""
        try:
            self.arrive()
        except Exception:
            traceback.print_exc()
        return '_begun' in self.__dict__

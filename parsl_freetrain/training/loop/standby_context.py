"""A standby rank: started while the fragment before trains, it waits where it must know its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.fragment_run import FragmentRun
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fork_messages import ForkRequest, Launch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Decoder, ToRank, Waiting

_LARGEST_REQUEST = 1_000_000


class StandbyPlace:
    """Where a standby rank waits, at most ``wait_s``; ``channel`` becomes its node agent's."""

    def __init__(
        self, channel: Channel[ToRank], asker: Channel[ForkRequest], wait_s: float
    ) -> None:
        self._channel = channel
        self._asker = asker
        self._wait_s = wait_s

    def wait(self) -> tuple[FragmentOrder, RankPlace]:
        """Wait for the fragment. Ends the process if none comes."""
        self._asker.send(Waiting(), wait=False)
        self._asker.close()
        data, fd = b'', None
        if self._channel.poll(self._wait_s):
            with suppress(OSError):
                data, fd = self._channel.recv_fd(_LARGEST_REQUEST)
        launch = Decoder[Launch](Launch, 'the fork server').decode(data) if data else None
        if launch is None or fd is None:
            os._exit(0)
        self._channel.become(fd)
        return launch.order, launch.place


class StandbyContext(FragmentContext):
    """Knows the trainer and the device; on access to another attribute it waits, by ``arrive``."""

    def __init__(
        self, trainer: str, device: torch.device, arrive: Callable[[], FragmentRun]
    ) -> None:
        self.__dict__.update(trainer=trainer, device=device, _arrive=arrive)

    def __getattr__(self, name: str) -> Any:  # called only for attributes that are not set yet
        if not self.arrive():
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.arrive()
        super().__setattr__(name, value)

    def arrive(self) -> bool:
        """Wait for the fragment if that has not been done. Returns whether this call did it."""
        arrive = self.__dict__.pop('_arrive', None)
        if arrive is not None:
            super().__init__(arrive())
        return arrive is not None

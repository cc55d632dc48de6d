"""A standby rank: it is started while the previous fragment still trains, and waits where it first
needs to know its own fragment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.rank_parts import RankParts
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.codec import Decoder
from parsl_freetrain.training.spec.fork_messages import ForkRequest, Launch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import ToRank, Waiting

_LARGEST_REQUEST = 1_000_000


class StandbyPlace:
    """Where a standby rank waits for its fragment.

    Parameters
    ----------
    channel
        To the fork server. When the fragment is launched, it becomes the connection to the node
        agent.
    asker
        Connection to the process that asked for this rank, which is told when the rank waits.
    wait_s
        Seconds after which the rank ends if no fragment comes.
    """

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
    """The context of a standby rank. On first access to an attribute that depends on the fragment,
    it waits for the fragment.

    Parameters
    ----------
    trainer, device
        Known before the fragment, as in
        :class:`~parsl_freetrain.training.loop.context.FragmentContext`.
    arrive
        Waits for the fragment.
    """

    def __init__(self, trainer: str, device: torch.device, arrive: Callable[[], RankParts]) -> None:
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
        if arrive is None:
            return False
        super().__init__(arrive())
        self.__dict__['_begun'] = True
        return True

    @property
    def arrived(self) -> bool:
        """Whether it has its fragment, or has failed to begin it."""
        return '_arrive' not in self.__dict__

    @property
    def began(self) -> bool:
        """Whether the fragment has begun."""
        return '_begun' in self.__dict__

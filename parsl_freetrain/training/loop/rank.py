"""One rank from its start to its last message."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import cloudpickle
import tblib
import torch
import torch.distributed as dist
from msgspec.structs import replace

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.store import Fenced
from parsl_freetrain.training.comm import devices
from parsl_freetrain.training.comm.collectives import is_peer_loss, join
from parsl_freetrain.training.comm.device_faults import device_fault, storage_trouble
from parsl_freetrain.training.comm.exchange_watch import exchanges
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader import seed_everything, worker_died
from parsl_freetrain.training.data.own_generators import own_generators
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.fragment_run import FragmentRun
from parsl_freetrain.training.loop.loop_state import FragmentEnd, Phase
from parsl_freetrain.training.loop.start import begin
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.linux import keep_freed_memory
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.fork_messages import ForkRequest, Launch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Decoder, Outcome, RankEnd, RankError, ToRank
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.steps import determinism

_LARGEST_MESSAGE = 1_000_000


@dataclass(frozen=True)
class StandbyPlace:
    """Where a standby rank waits, at most ``wait_s``; ``channel`` becomes its node agent's."""

    channel: Channel[ToRank]
    asker: Channel[ForkRequest]
    wait_s: float

    def wait(self) -> tuple[FragmentOrder, RankPlace]:
        """Wait for the fragment. Ends the process if none comes."""
        self.asker.send(msg.Waiting(), wait=False)
        self.asker.close()
        data, fd = b'', None
        if self.channel.poll(self.wait_s):
            with suppress(OSError):
                data, fd = self.channel.recv_fd(_LARGEST_MESSAGE)
        launch = Decoder[Launch](Launch, 'the fork server').decode(data) if data else None
        if launch is None or fd is None:
            os._exit(0)
        self.channel.become(fd)
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


class Rank:
    """One rank of a fragment. A standby one waits at ``standby`` for its actual order and place."""

    def __init__(
        self,
        order: FragmentOrder,
        place: RankPlace,
        channel: Channel[ToRank],
        standby: StandbyPlace | None = None,
    ) -> None:
        self._order, self._place, self._channel = order, place, channel
        self._standby, self._arrived = standby, standby is None
        self._inbox = Inbox(channel)
        self._device = torch.device('cpu')
        self._peers: Peers | None = None
        self._run: FragmentRun | None = None
        self._how: RankEnd = 'finished'
        self._error: RankError | None = None
        self._said_last = threading.Lock()

    def run(self, payload: bytes) -> int:
        """Its last message is the outcome. Returns the exit status: 0 if it finished or stopped as
        it should. ``payload`` is cloudpickle's, from a process of the same user only.
        """
        self._inbox.listen_to_signals()
        try:
            self._train(payload)
        except BaseException as raised:  # the node agent must hear of any error
            # torch would raise the end of a data worker once more, at the end of each other one.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if not self._arrived:
                # The fragment before still trains, and holds what this rank may have failed for: a
                # GPU's memory, a lock. Without this rank, the next fragment starts plainly.
                _log_error()
                return 1
            self._end_by(raised)
        if self._well and self._peers and not self._peers.barrier() and self._place.rank > 0:
            # Rank 0 has not come this far, so it is unknown whether the state is saved.
            self._how = 'peer-lost'
        if self._run is None:  # the fragment could not begin
            self._say_last(Outcome(self._how, error=self._error))
        else:
            memory = devices.peak_memory(self._device)  # without the copy that it may leave
            self._say_last(replace(self._run.outcome(self._how, self._error), memory=memory))
        return 0 if self._well else 1

    @property
    def _well(self) -> bool:
        return self._how in ('finished', 'stopped')

    def _train(self, payload: bytes) -> None:
        self._device = set_up(self._order, self._place)
        function, args, kwargs = cloudpickle.loads(payload)
        if self._standby is None:
            context = FragmentContext(self._begin(self._order, self._place))
        else:
            context = StandbyContext(self._order.trainer, self._device, self._arrive)
        returned = function(context, *args, **kwargs)
        run = context._run  # here a standby rank gets its fragment at the latest
        if run.state.phase is Phase.STOPPED:  # the function has caught FragmentEnd
            self._how = 'stopped'
        else:
            run.finish(returned)

    def _arrive(self) -> FragmentRun:
        assert self._standby is not None
        self._arrived = True
        return self._begin(*self._standby.wait())

    def _begin(self, order: FragmentOrder, place: RankPlace) -> FragmentRun:
        self._place = place
        print(
            f'Trainer {order.trainer}, fragment {order.fragment}: rank {place.rank} of '
            f'{place.world_size}'
        )
        peers = self._peers = join(
            order, place, self._channel, self._inbox, devices.name_of(self._device)
        )()
        if place.world_size > 1:
            who = place.rank, self._channel.send, peers.broken, self._end_in
            threading.Thread(target=exchanges.watch, args=who, daemon=True).start()
            print(f'Tensors are exchanged by {dist.get_backend()}')
        how = peers, self._channel, self._inbox, self._device
        self._run = FragmentRun(begin(order, place, *how))
        return self._run

    def _end_by(self, raised: BaseException) -> None:
        worker = worker_died(raised)
        self._how = self._ending(raised, worker)
        if self._well:
            return
        if self._peers is not None:
            self._peers.abort()
        _log_error()
        self._error = _described(determinism.explained(raised))
        shared = self._order.spec.ranks.share_devices
        message = (
            device_fault(raised) or worker or devices.where_shared(self._error.message, shared)
        )
        self._error = replace(self._error, message=message)

    def _ending(self, raised: BaseException, worker: str) -> RankEnd:
        if self._run is not None and self._run.state.phase is Phase.STOPPED:
            with suppress(Exception):
                self._run.checkpointer.stopped()
                return 'stopped'
            return 'error'
        if isinstance(raised, FragmentEnd):  # an earlier fragment has done it all
            return 'finished'
        if isinstance(raised, Fenced):
            return 'fenced'
        # A damaged checkpoint is set aside, and the next fragment uses another. The death of a
        # worker is as if the rank itself had died.
        if (isinstance(raised, Damaged) and not isinstance(raised, BadInput)) or worker:
            return 'peer-lost'
        if device_fault(raised):
            return 'device-fault'
        if self._place.world_size > 1 and is_peer_loss(raised):
            return 'peer-lost'
        return 'storage' if storage_trouble(raised) else 'error'

    def _end_in(self, exchange: str) -> None:
        print(f'This rank waits in {exchange} for one that is gone, so it ends.', file=sys.stderr)
        outcome = Outcome('peer-lost' if self._well else self._how, error=self._error)
        if self._run is not None and self._run.state.phase is Phase.STOPPED:
            outcome = self._run.outcome('stopped', None)  # when its checkpoint is written
        self._say_last(outcome)
        os._exit(1)

    def _say_last(self, outcome: Outcome) -> None:
        if not self._said_last.acquire(blocking=False):
            threading.Event().wait()  # the other thread ends the process
        self._channel.send(outcome)


def _log_error() -> None:
    # The executor must hear of an error that filled the disk, although the log cannot grow.
    with suppress(OSError):
        traceback.print_exc()


def set_up(order: FragmentOrder, place: RankPlace) -> torch.device:
    """Prepare this process for training; returns its device."""
    keep_freed_memory()
    torch.set_num_threads(order.spec.ranks.threads)
    if isinstance(order.spec.mode, Reproducible):
        determinism.demand_determinism(warn_only=order.spec.mode.warn_only)
        determinism.fill_new_memory(False)
    device = devices.take_devices(
        place.local_rank, order.per_node, shared=order.spec.ranks.share_devices
    )
    print(
        f'Process {os.getpid()}: device {device} ({devices.visible_as()}), '
        f'{order.spec.ranks.threads} threads'
    )
    own_generators.forget()
    # What the function draws before its loop (initial weights) must be the same on all ranks.
    seed_everything(order.spec.mode.seed)
    return device


def _described(raised: BaseException) -> RankError:
    # Leave out our own frames; the traceback begins in the user's function.
    trace = raised.__traceback__
    while trace is not None and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        message = str(raised)
    except Exception as error:  # the user's code
        message = f'(its text cannot be told: {type(error).__name__})'
    if 'Expected more than 1 value per channel' in message:
        message = (
            f'A part of a global batch had one sample, too few for batch statistics ({message}): '
            'say ctx.loop(..., drop_last=True) if it was the last batch of an epoch, or use larger '
            'batches or fewer parts (shards, nodes).'
        )
        raised = BadInput(message)
    if 'Expected all tensors to be on the same device' in message:
        raised.add_note(
            'ctx.prepare and ctx.loop move models and batches to ctx.device; what the function '
            'makes itself, such as a second model or torch.zeros, needs .to(ctx.device).'
        )
        message = f'{message} {raised.__notes__[-1]}'
    if isinstance(raised, SystemExit):
        message = f'the function called sys.exit({raised.code!r}); let it return instead'
    return RankError(
        type(raised).__name__,
        message,
        ''.join(traceback.format_exception(type(raised), raised, trace)),
        _packed(raised, trace),
        getattr(raised, 'final', False) is True,
    )


def _packed(raised: BaseException, trace: TracebackType | None) -> bytes | None:
    """``cloudpickle.dumps((exception, tblib's traceback dict))``; None: impossible, or large."""
    try:
        data = cloudpickle.dumps((raised, tblib.Traceback(trace).to_dict()))
        str(cloudpickle.loads(data)[0])
    except Exception:  # the exception's own code may raise anything
        print('The exception cannot be sent as an object:', file=sys.stderr)
        traceback.print_exc()
        return None
    return data if len(data) <= _LARGEST_MESSAGE else None

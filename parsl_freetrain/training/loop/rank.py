"""One rank from its start to its last message."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType

import cloudpickle
import tblib
import torch
import torch.distributed as dist
from msgspec.structs import replace

from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.store import Fenced
from parsl_freetrain.training.comm.collectives import is_peer_loss, join
from parsl_freetrain.training.comm.device_faults import device_fault
from parsl_freetrain.training.comm.devices import name_of, peak_memory, take_devices, visible_as
from parsl_freetrain.training.comm.exchange_watch import RankLinks, exchanges
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader import seed_everything
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.rank_parts import RankParts
from parsl_freetrain.training.loop.standby_context import StandbyContext, StandbyPlace
from parsl_freetrain.training.loop.start import begin as begin_fragment
from parsl_freetrain.training.loop.training_loop import FragmentEnd
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.linux import keep_freed_memory
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Ending, Outcome, RankError, ToRank
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.steps.determinism import demand_determinism, explained

_LARGEST_EXCEPTION = 1_000_000


def run_rank(
    order: FragmentOrder,
    place: RankPlace,
    payload: bytes,
    channel: Channel[ToRank],
    standby: StandbyPlace | None = None,
) -> int:
    """Run one rank of a fragment. Its last message is the outcome.

    Parameters
    ----------
    order, place
        The rank's instructions.
    payload
        ``cloudpickle.dumps((function, args, kwargs))``. It must come only from a channel to a
        process of the same user.
    channel
        To and from the node agent.
    standby
        Where a standby rank waits for its actual order and place. Until then it uses only what
        ``order`` and ``place`` say about the trainer and the node.

    Returns
    -------
    int
        Exit status: 0 if the fragment finished or stopped as it should.
    """
    inbox = Inbox(channel)
    inbox.listen_to_signals()
    peers: Peers | None = None
    context: FragmentContext | None = None
    how: Ending = 'finished'
    error: RankError | None = None
    said_last = threading.Lock()

    def say_last(outcome: Outcome) -> None:
        if not said_last.acquire(blocking=False):
            threading.Event().wait()  # the other thread ends the process
        channel.send(outcome)

    def end_in(exchange: str) -> None:
        print(f'This rank waits in {exchange} for one that is gone, so it ends.', file=sys.stderr)
        failed = how not in ('finished', 'stopped')
        say_last(Outcome(how if failed else 'peer-lost', error=error))
        os._exit(1)

    def begin(order: FragmentOrder, its_place: RankPlace) -> RankParts:
        nonlocal peers, place
        place = its_place
        print(
            f'Trainer {order.trainer}, fragment {order.fragment}: rank {place.rank} of '
            f'{place.world_size}'
        )
        peers = join(order, place, channel, inbox, name_of(device))()
        if place.world_size > 1:
            exchanges.start(RankLinks(place.rank, channel.send, peers.broken, end_in))
            print(f'Tensors are exchanged by {dist.get_backend()}')
        return begin_fragment(order, place, peers, channel, inbox, device)

    try:
        device = set_up(order, place)
        function, args, kwargs = cloudpickle.loads(payload)
        if standby is None:
            context = FragmentContext(begin(order, place))
        else:
            context = StandbyContext(order.trainer, device, lambda: begin(*standby.wait()))
        returned = function(context, *args, **kwargs)
        if context.stopped:  # the function has caught FragmentEnd
            how = 'stopped'
        else:
            context.finish(returned)
    except BaseException as raised:  # the node agent must hear of any error
        if standby is not None and not (isinstance(context, StandbyContext) and context.arrived):
            # The fragment before still trains, and holds what this rank may have failed for: a
            # GPU's memory, a lock. Without this rank, the next fragment starts plainly.
            _log_error()
            return 1
        if isinstance(context, StandbyContext) and not context.began:
            context = None  # the fragment could not begin
        how = _ending(raised, context, place)
        if how not in ('stopped', 'finished'):
            if peers is not None:
                peers.abort()
            _log_error()
            error = _described(explained(raised))
            if how == 'device-fault':
                error = replace(error, message=device_fault(raised))
    if (
        how in ('finished', 'stopped')
        and peers is not None
        and not peers.barrier()
        and place.rank > 0
    ):
        # Rank 0 has not come this far, so it is unknown whether the state is saved.
        how = 'peer-lost'
    # Not with the copy of the state that a rank may leave.
    memory = 0 if context is None else peak_memory(context.device)
    outcome = Outcome(how, error=error) if context is None else context.outcome(how, error)
    say_last(replace(outcome, memory=memory))
    return 0 if how in ('finished', 'stopped') else 1


def _log_error() -> None:
    # The executor must hear of an error that filled the disk, although the log cannot grow.
    with suppress(OSError):
        traceback.print_exc()


def set_up(order: FragmentOrder, place: RankPlace) -> torch.device:
    """Prepare this process for training; returns its device."""
    keep_freed_memory()
    torch.set_num_threads(order.spec.ranks.threads)
    if isinstance(order.spec.mode, Reproducible):
        demand_determinism(warn_only=order.spec.mode.warn_only)
    device = take_devices(place.local_rank, order.per_node)
    print(
        f'Process {os.getpid()}: device {device} ({visible_as()}), '
        f'{order.spec.ranks.threads} threads'
    )
    # What the function draws before its loop (initial weights) must be the same on all ranks.
    seed_everything(order.spec.mode.seed)
    return device


def _ending(raised: BaseException, context: FragmentContext | None, place: RankPlace) -> Ending:
    if context is not None and context.stopped:
        return 'stopped'
    if isinstance(raised, FragmentEnd):  # an earlier fragment has done it all
        return 'finished'
    if isinstance(raised, Fenced):
        return 'fenced'
    if isinstance(raised, Damaged):
        return 'peer-lost'  # the checkpoint is set aside, and the next fragment uses the one before
    if device_fault(raised):
        return 'device-fault'
    return 'peer-lost' if place.world_size > 1 and is_peer_loss(raised) else 'error'


def _described(raised: BaseException) -> RankError:
    # Leave out our own frame; the traceback begins in the user's function.
    below = raised.__traceback__.tb_next if raised.__traceback__ is not None else None
    trace = below or raised.__traceback__
    message = str(raised)
    if isinstance(raised, SystemExit):
        message = f'the function called sys.exit({raised.code!r}); let it return instead'
    return RankError(
        type(raised).__name__,
        message,
        ''.join(traceback.format_exception(type(raised), raised, trace)),
        _packed(raised, trace),
    )


def _packed(raised: BaseException, trace: TracebackType | None) -> bytes | None:
    """``cloudpickle.dumps((exception, tblib's traceback dict))``; None if it is too large or cannot
    be pickled and unpickled.
    """
    try:
        data = cloudpickle.dumps((raised, tblib.Traceback(trace).to_dict()))
        cloudpickle.loads(data)
    except Exception:  # the exception's own code may raise anything
        print('The exception cannot be sent as an object:', file=sys.stderr)
        traceback.print_exc()
        return None
    return data if len(data) <= _LARGEST_EXCEPTION else None

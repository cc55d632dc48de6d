"""One rank from its first breath to its last message."""

from __future__ import annotations

import base64
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
import tblib
import torch
import torch.distributed as dist

from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.training.ahead import AheadContext, Berth
from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.context import FragmentContext
from parsl_freetrain.training.data import seed_everything
from parsl_freetrain.training.fragment import REPRODUCIBLE, FragmentOrder, RankPlace
from parsl_freetrain.training.gpus import VISIBLE_VARIABLE, name_of, take_gpus
from parsl_freetrain.training.handover import receive
from parsl_freetrain.training.inbox import Inbox
from parsl_freetrain.training.keeper import Keeper
from parsl_freetrain.training.leaving import Leaving
from parsl_freetrain.training.peers import Peers, is_peer_loss, join
from parsl_freetrain.training.seams import saving
from parsl_freetrain.training.state import read_state
from parsl_freetrain.training.store import Fenced, PosixCheckpointStore

_LARGEST_EXCEPTION = 1_000_000


def run_rank(order: FragmentOrder, place: RankPlace, payload: bytes, channel: Channel, berth: Berth | None = None) -> int:
    """Run a fragment's rank; its last message is the outcome.

    Parameters
    ----------
    order, place
        What the rank is told.
    payload
        ``cloudpickle.dumps((function, args, kwargs))``, from the channel of our own user and from nowhere else.
    channel
        To and from the member.
    berth
        Where this rank learns its order and its place, if it runs ahead; of those given only the trainer's and the node's part counts then.

    Returns
    -------
    int
        Exit status: 0 if the fragment finished or stopped as it should.

    Notes
    -----
    'samples' of the outcome is what this rank has seen, rank 0's 'path' the last committed checkpoint (None: there is
    none; the other ranks don't know). A rank that says 'stopped' or 'finished' knows that the state is committed.
    """
    inbox = Inbox(channel)
    inbox.listen_to_signals()
    peers: Peers | None = None
    context: FragmentContext | None = None
    how, error = 'finished', None

    def begin(order: FragmentOrder, its_place: RankPlace) -> tuple[Any, ...]:
        nonlocal peers, place
        place = its_place
        print(f'Trainer {order.trainer}, fragment {order.fragment}: rank {place.rank} of {place.world_size}')
        peers = join(order, place, channel, inbox, name_of(device))()
        if place.world_size > 1:
            print(f'Tensors are exchanged by {dist.get_backend()}')
        return _parts(order, place, peers, channel, inbox, device)
    try:
        device = _set_up(order, place)
        function, args, kwargs = cloudpickle.loads(payload)
        if berth is None:
            context = FragmentContext(*begin(order, place))
        else:
            context = AheadContext(order.trainer, device, lambda: begin(*berth.wait()))
        function(context, *args, **kwargs)
        if context.stopped:  # the function has swallowed the end
            how = 'stopped'
        else:
            context.finish()
    except BaseException as raised:  # whatever it is, the member must hear of it
        if isinstance(context, AheadContext) and not context.began():
            context = None  # it could not begin
        how = _ending(raised, context, place)
        if how != 'stopped':
            traceback.print_exc()
            error = _described(raised)
    if how in ('finished', 'stopped') and peers is not None and not peers.leave() and place.rank > 0:
        # Rank 0 has not come as far as this, so nobody knows whether the state is saved.
        how = 'peer-lost'
    if context is not None:
        channel.send(context.outcome(how, error))
    else:
        channel.send({'kind': 'outcome', 'how': how, 'samples': 0, 'path': None, 'metrics': {}, 'error': error})
    return 0 if how in ('finished', 'stopped') else 1


def _set_up(order: FragmentOrder, place: RankPlace) -> torch.device:
    torch.set_num_threads(order.threads)
    if order.mode == REPRODUCIBLE:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # what CUDA's matrix products need to be deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
    device = take_gpus(place.local_rank, order.ranks_per_node)
    print(f'Process {os.getpid()}: device {device} ({VISIBLE_VARIABLE}={os.environ.get(VISIBLE_VARIABLE)}), '
          f'{order.threads} threads')
    # What the function draws before its loop (initial weights) is the same on all ranks.
    seed_everything(order.seed)
    return device


def _parts(order: FragmentOrder, place: RankPlace, peers: Peers, channel: Channel, inbox: Inbox, device: torch.device) -> tuple[Any, ...]:
    """What a context is made of."""
    store = PosixCheckpointStore(Path(order.store), order.trainer, hook=saving)
    handed = order.handover
    saved = receive(handed, order.trainer, peers) if handed is not None else None
    latest = None

    def find() -> str:
        nonlocal latest
        store.fence(order.fragment)
        if saved is not None and handed is not None:
            latest = Checkpoint(order.trainer, handed.path, handed.samples, handed.fragment, dict(handed.metrics))
        else:
            latest = store.latest()
        return latest.path if latest is not None else ''
    # Rank 0 verifies and chooses; ranks that looked for themselves might choose differently.
    path = peers.tell('checkpoint', find)
    if path:
        print(f'Going on from checkpoint {path}{", as it is in memory" if saved is not None else ""}')
    if saved is None and path:
        saved = read_state(path)
    keeper = Keeper(store, order, channel, latest, Leaving(order.trainer, peers, inbox))
    return order, place, peers, channel, inbox, keeper, device, saved


def _ending(raised: BaseException, context: FragmentContext | None, place: RankPlace) -> str:
    if context is not None and context.stopped:
        return 'stopped'
    if isinstance(raised, Fenced):
        return 'fenced'
    return 'peer-lost' if place.world_size > 1 and is_peer_loss(raised) else 'error'


def _described(raised: BaseException) -> dict[str, Any]:
    # Without our own frame; what is left begins in the user's function.
    below = raised.__traceback__.tb_next if raised.__traceback__ is not None else None
    trace = below or raised.__traceback__
    return {'type': type(raised).__name__, 'message': str(raised),
            'traceback': ''.join(traceback.format_exception(type(raised), raised, trace)), 'exception': _packed(raised, trace)}


def _packed(raised: BaseException, trace: Any) -> str | None:
    """The exception as base64 of ``cloudpickle.dumps((exception, tblib's traceback dict))``; None if it does not survive that."""
    try:
        data = cloudpickle.dumps((raised, tblib.Traceback(trace).to_dict()))
        cloudpickle.loads(data)
    except Exception:  # the exception's own code may raise anything here
        print('The exception cannot be sent as an object:', file=sys.stderr)
        traceback.print_exc()
        return None
    return base64.b64encode(data).decode() if len(data) <= _LARGEST_EXCEPTION else None

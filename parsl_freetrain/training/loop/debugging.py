"""A training in the user's own process, on one rank, for debuggers and for the first try."""

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.comm import world
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.fragment_run import FragmentRun
from parsl_freetrain.training.loop.rank import set_up
from parsl_freetrain.training.loop.start import begin
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Decoder, FromRank, ToRank
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.steps.determinism import fill_new_memory


def train_here(
    name: str,
    spec: TrainingSpec,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Checkpoint:
    """Train to the total in this process, in a temporary folder: the checkpoint has no path."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = Channel(theirs, Decoder[FromRank](FromRank, 'the training'))
    # The rank's messages have to be read by somebody.
    reader = threading.Thread(target=_read_all, args=(listener,), daemon=True)
    reader.start()
    channel = Channel(ours, Decoder[ToRank](ToRank, 'nobody'))
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = fill_new_memory(True)
    try:
        with tempfile.TemporaryDirectory(prefix='freetrain-debug-') as folder:
            order = FragmentOrder(name, 1, str(Path(folder, name)), spec.with_ranks(1), None)
            place = RankPlace(0, 1, 0, 1, '')
            device = set_up(order, place)
            fill_new_memory(True)  # it finds what reads memory that was not written
            run = FragmentRun(begin(order, place, Peers(), channel, Inbox(channel), device))
            run.finish(function(FragmentContext(run), *args, **kwargs))
            outcome = run.outcome('finished', None)
            if run.model is not None:
                run.model.carried.forget()
    finally:
        world.refuse_in_body(bool)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        fill_new_memory(filled)
        # Workers of a loader may still hold the socket, too: to close it would not end the reader.
        ours.shutdown(socket.SHUT_RDWR)
        channel.close()
        reader.join()
        listener.close()
    result = json.loads(outcome.result) if outcome.result else None
    return Checkpoint(name, '', outcome.samples, 1, dict(outcome.metrics), result)


def _read_all(listener: Channel[FromRank]) -> None:
    with suppress(EOFError):
        while True:
            listener.recv()

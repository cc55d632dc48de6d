"""Messages between processes: they survive the way, and nonsense is dropped wherever it arrives."""

import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import zmq
from hypothesis import strategies as st

from parsl_freetrain import Checkpoint, Shape
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor.fragment.control_channel import ControlClient, ControlServer
from parsl_freetrain.executor.fragment.member import Member
from parsl_freetrain.executor.fragment.member_order import ControlEndpoint, MemberOrder, RankResult
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.process.fork_client import ForkClient, RankProcess
from parsl_freetrain.training.spec import fork_messages as fm
from parsl_freetrain.training.spec import messages as ms
from parsl_freetrain.training.spec.fragment_order import RankPlace
from parsl_freetrain.training.spec.messages import Decoder, FromMember, FromRank, encode
from tests.support.properties import holds_for
from tests.support.ranks import channel_pair, order
from tests.support.waiting import LIMIT_S

PLACE = RankPlace(0, 1, 0, 1, '/log')
ORDER = order(Path('/'))
METRICS = {'loss': 0.5}
RENDEZVOUS = ms.Rendezvous('10.0.0.1', 29400, 'secret')
NEWS: list[Any] = [
    RENDEZVOUS,
    ev.TotalKnown(1.0, 'a', 100),
    ev.RoundKnown(1.0, 'a', 20),
    ev.FragmentStarted(1.0, 'a', 1, 0),
    ev.FragmentProgressed(3.0, 'a', 1, 10, 2.0, METRICS),
    ms.SavingCheckpoint(),
    ms.Stuck(1, 'gather'),
    ms.StateUsed(),
    ev.CheckpointSaved(3.0, Checkpoint('t', '/c\udc80', 10, 2, METRICS, None, 3.0, 0.2, 0.1)),
]
FROM_RANK = [
    *NEWS,
    ms.RankPid(17),
    ms.Waiting(),
    ms.LeavingState(),
    ms.Outcome(
        'error',
        10,
        error=ms.RankError('T', 'message', 'trace', b'exception'),
        left=ms.StateLeft('digest', 10, here=True, needs=8),
    ),
    ms.Exit(-9),
]
FROM_MEMBER = [*NEWS, ms.Hello('n1'), ms.Alive(), ms.Notice('SIGTERM'), ms.RankEnded(0, ok=False)]
FROM_MEMBER.append(ms.StandbyReady())
STOP = ms.StopTraining('preempted', node_leaves=True)
TO_RANK = [RENDEZVOUS, STOP, ms.NodeStays(), ms.NodeEnds(1e5)]
TO_MEMBER = [
    RENDEZVOUS, STOP, ms.Abandon('hangs', 5.0), ms.AreYouThere(), ms.StartStandby(150.0),
    ms.TimeLeft(60.0),
]  # fmt: skip
REQUESTS = [
    fm.Launch(ORDER, PLACE, {'A': '\udc80'}, 'digest'),
    fm.Launch(ORDER, PLACE, {}, 'digest', 30.0),
    fm.ForkServerWanted('n', 17, '/log', {'A': 'B'}, ['/p'], '/', [0, 1], '/usr', '3.11'),
    fm.Ping(),
    fm.Quit(),
    fm.OfferState('t', 2, 10),
    fm.KeepState('t', 'digest', fm.OfferState('t', 2, 10), 'rank-0.safetensors'),
    fm.FetchState('t', 'digest', keep=True),
]
ANSWERS = [fm.Ready(17), fm.StateWanted(), fm.StateKept(), fm.Refused('another Python')]
ANSWERS += [fm.Serving(), fm.ForkServerEnded(3)]
CHANNELS = {
    'rank to member': (ms.FromRank, FROM_RANK),
    'member to rank': (ms.ToRank, TO_RANK),
    'member to executor': (ms.MemberMessage, FROM_MEMBER),
    'executor to member': (ms.ToMember, TO_MEMBER),
    'to the fork server': (fm.ForkRequest, REQUESTS),
    'from the fork server': (fm.ForkAnswer, ANSWERS),
}
ODD: list[Any] = [
    None, True, -1, 0, 2**53, 2**64, 10**400, 0.5, math.nan, math.inf, -math.inf, 1e300,
    '', 'x' * 5000, '\ud800', [], [[]], {}, {'kind': 'ping'},
]  # fmt: skip
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


def changed(message: Any, key: int, value: Any, inside: bool) -> bytes:
    """A message with another value in one of its fields."""
    document = json.loads(encode(message))
    part = document['message'] if inside and 'message' in document else document
    part[list(part)[key % len(part)]] = value
    return json.dumps(document).encode()


def nonsense(messages: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """What may arrive in place of one of these messages; now and then it is one."""
    valid = st.sampled_from(messages)
    return st.one_of(
        st.binary(max_size=99),
        DOCUMENTS.map(lambda document: json.dumps(document).encode()),
        st.text(max_size=9).map(lambda kind: json.dumps({'kind': kind}).encode()),
        st.builds(lambda m, n: encode(m)[: n % len(encode(m))], valid, st.integers(0, 9999)),
        st.builds(changed, valid, st.integers(0, 99), st.sampled_from(ODD), st.booleans()),
        st.just(b'[' * 100_000),
        st.just(b'9' * 10_000),
    )


@pytest.mark.parametrize('channel', CHANNELS)
def test_every_message_of_a_channel_survives_the_way(channel: str) -> None:
    union, messages = CHANNELS[channel]
    assert {type(message) for message in messages} == set(get_args(union))
    decoder: Decoder[Any] = Decoder(union, 'a test')
    for message in messages:
        assert decoder.decode(encode(message)) == message
    odd = ev.FragmentProgressed(1.0, 'a', 1, 1, 1.0, {'loss': math.nan, 'norm': math.inf})
    [back] = [Decoder[ev.FragmentProgressed](ev.FragmentProgressed, 'a test').decode(encode(odd))]
    assert back is not None and math.isnan(back.metrics['loss']) and back.metrics['norm'] > 1e300


def test_a_trainer_with_shapes_can_be_launched() -> None:
    spec = msgspec.structs.replace(ORDER.spec, shapes={2: (Shape(2),)})  # JSON has no whole keys
    launch = fm.Launch(replace(ORDER, spec=spec), PLACE, {}, 'digest')
    assert Decoder[fm.ForkRequest](fm.ForkRequest, 'a test').decode(encode(launch)) == launch


@pytest.mark.parametrize('channel', CHANNELS)
@holds_for(data=st.data(), tries=50)
def test_a_decoder_never_raises_and_gives_what_is_expected(
    channel: str, data: st.DataObject
) -> None:
    union, messages = CHANNELS[channel]
    found = Decoder[Any](union, 'a test').decode(data.draw(nonsense(messages)))
    assert found is None or isinstance(found, get_args(union))
    for name, value in msgspec.structs.asdict(found).items() if found is not None else ():
        if isinstance(value, (int, float)):
            assert abs(value) <= 2**53, name  # finite, and what a ledger can store


def test_unknown_kinds_are_logged_once_and_not_too_many(caplog: pytest.LogCaptureFixture) -> None:
    decoder: Decoder[Any] = Decoder(ms.FromRank, 'rank 7')
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert decoder.decode(b'{"kind": "new"}') is None
        [record] = caplog.records
        assert 'rank 7' in record.getMessage() and "'new'" in record.getMessage()
        for number in range(100):
            decoder.decode(json.dumps({'kind': f'{number}' * 1000}).encode())
    assert len(caplog.records) <= 10
    assert all(len(record.getMessage()) < 500 for record in caplog.records)


@holds_for(arrives=nonsense(TO_RANK), tries=50)
def test_a_rank_goes_on_after_nonsense(arrives: bytes) -> None:
    ours, theirs = channel_pair()
    with closing(ours), closing(theirs):
        inbox = Inbox(ours)
        theirs.send_bytes(arrives)
        inbox.standing()
        theirs.send(STOP)
        assert inbox.stop_requested()


@holds_for(arrives=nonsense(FROM_RANK), tries=50)
def test_a_member_goes_on_after_nonsense_of_a_rank(arrives: bytes) -> None:
    ours, theirs = channel_pair()
    sent: list[Any] = []
    control: Any = SimpleNamespace(send=sent.append)
    with closing(ours):
        endpoint = ControlEndpoint([], 0, None, None, '/logs')
        member = Member(MemberOrder(ORDER, 0, 1, endpoint, '/logs'))
        process = RankProcess(theirs, os.getpid())
        member._results[0] = RankResult(0, 'n1', '/log')
        try:
            for data in (arrives, encode(ev.TotalKnown(1.0, 'a', 77))):
                ours.send_bytes(data)
                assert member._hear(0, process, control)
            assert sent[-1] == ev.TotalKnown(1.0, 'a', 77)
        finally:
            process.close()


@pytest.fixture(scope='module')
def server() -> Iterator[ControlServer]:
    server = ControlServer(None, '127.0.0.1', (50000, 60000))
    yield server
    server.close()


@pytest.fixture(scope='module')
def client(server: ControlServer) -> Iterator[ControlClient]:
    ended, tell_ended = threading.Event(), server._connection_ended

    def tell(descriptor: int) -> None:
        tell_ended(descriptor)
        ended.set()

    server._connection_ended = tell  # type: ignore[assignment,method-assign]
    client = ControlClient(['127.0.0.1'], server.port, None, ('cnn', 3, 1))
    # It has tried first whether the address answers. The end of that connection, heard of late,
    # would seem to be the end of this one, which has the same file descriptor.
    assert ended.wait(LIMIT_S)
    client.send(ms.Alive())
    assert list(server.receive(LIMIT_S))
    yield client
    client.close()


@holds_for(
    arrives=nonsense([FromMember('cnn', 3, 1, message) for message in FROM_MEMBER]), tries=50
)
def test_the_executor_goes_on_after_nonsense_of_a_member(
    server: ControlServer, client: ControlClient, arrives: bytes
) -> None:
    client.socket.send_multipart([arrives, b''] if len(arrives) % 2 else [arrives])
    client.send(ms.Hello('last'))
    heard: list[FromMember] = []
    while not heard or heard[-1].message != ms.Hello('last'):
        heard += server.receive(LIMIT_S)
    assert all(isinstance(message, FromMember) for message in heard)


@holds_for(arrives=nonsense(TO_MEMBER), tries=50)
def test_a_member_goes_on_after_nonsense_of_the_executor(
    server: ControlServer, client: ControlClient, arrives: bytes
) -> None:
    server._router.send_multipart([server._identities['cnn', 3, 1], arrives])
    assert server.send(('cnn', 3, 1), ms.Abandon('last'))
    heard: list[Any] = []
    while not heard or heard[-1] != ms.Abandon('last'):
        assert client.socket.poll(int(1000 * LIMIT_S), zmq.POLLIN)
        if (message := client.receive()) is not None:
            heard.append(message)


@holds_for(
    tries=20,
    arrives=nonsense(REQUESTS).filter(
        lambda data: Decoder(fm.ForkRequest, '').decode(data) is None
    ),
)
def test_the_fork_server_goes_on_after_nonsense(fork_server: ForkClient, arrives: bytes) -> None:
    channel = fork_server._connect(Decoder[FromRank](FromRank, 'the fork server'))
    assert channel is not None
    with closing(channel):
        channel.send_bytes(arrives)
        assert channel.poll(LIMIT_S)
        with pytest.raises(EOFError):
            channel.recv()
    fork_server.wait_ready(LIMIT_S)

"""Messages stay whole when a sender is killed."""

import socket
import threading

import pytest

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.messages import Decoder
from tests.support.ranks import channel_pair


def pair() -> tuple[Channel[msg.FromRank], Channel[msg.FromRank], socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    decoder = Decoder[msg.FromRank](msg.FromRank, 'a rank')
    return Channel(one, decoder), Channel(other, decoder), one


def long(text: int) -> msg.Outcome:
    return msg.Outcome('error', path='x' * text)


def test_short_and_long_messages() -> None:
    one, other, _ = pair()
    message = long(1_000_000)  # more than the socket's buffer takes
    sender = threading.Thread(target=one.send, args=(message,))
    sender.start()
    assert other.recv() == message
    sender.join()
    assert one.send(msg.Waiting())
    assert other.poll()
    assert other.recv() == msg.Waiting()
    assert not other.poll()
    one.close()
    with pytest.raises(EOFError):
        other.recv()
    assert not other.send(msg.Waiting())
    other.close()


def test_an_unfinished_message_is_dropped() -> None:
    one, other, sock = pair()
    sock.send(b'+' + b'{"kind": "unfin')  # all that a sender got out before it was killed
    one.send(msg.Exit(-9))
    assert other.recv() == msg.Exit(-9)
    one.close()
    other.close()


def test_a_message_that_need_not_arrive_does_not_wait() -> None:
    one, other, _ = pair()
    sent = 0
    while one.send(ev.TotalKnown(1.0, 'a', sent), wait=False):
        sent += 1
    assert sent > 5
    assert [other.recv() for _ in range(sent)] == [
        ev.TotalKnown(1.0, 'a', number) for number in range(sent)
    ]
    assert not one.send(long(100_000), wait=False)
    one.close()
    other.close()


def test_a_stop_that_comes_before_the_rendezvous_is_kept() -> None:
    other, one = channel_pair()
    inbox = Inbox(other)
    assert not inbox.stop_requested()
    one.send(msg.StopTraining('preempted'))
    one.send(msg.Rendezvous('h', 1, 's'))
    assert inbox.wait_for_rendezvous(10).port == 1
    assert inbox.stop_requested()
    one.close()
    other.close()

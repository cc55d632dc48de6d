"""Messages stay whole, whoever is killed while it sends one."""

from __future__ import annotations

import socket
import threading

import pytest

from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.inbox import Inbox


def pair() -> tuple[Channel, Channel, socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(one), Channel(other), one


def test_short_and_long_messages() -> None:
    one, other, _ = pair()
    long = {'text': 'x' * 1_000_000}
    sender = threading.Thread(target=one.send, args=(long,))  # more than the socket's buffer takes
    sender.start()
    assert other.recv() == long
    sender.join()
    assert one.send({'kind': 'short'})
    assert other.poll()
    assert other.recv() == {'kind': 'short'}
    assert not other.poll()
    one.close()
    with pytest.raises(EOFError):
        other.recv()
    assert not other.send({})
    other.close()


def test_an_unfinished_message_is_dropped() -> None:
    one, other, sock = pair()
    sock.send(b'+' + b'{"kind": "unfin')  # all that a sender got out before it was killed
    one.send({'kind': 'exit', 'status': -9})
    assert other.recv() == {'kind': 'exit', 'status': -9}
    one.close()
    other.close()


def test_a_message_that_need_not_arrive_does_not_wait() -> None:
    one, other, _ = pair()
    sent = 0
    while one.send({'n': sent}, wait=False):
        sent += 1
    assert sent > 5
    assert [other.recv()['n'] for _ in range(sent)] == [*range(sent)]
    assert not one.send({'text': 'x' * 100_000}, wait=False)
    one.close()
    other.close()


def test_a_stop_that_comes_before_the_rendezvous_is_kept() -> None:
    one, other, _ = pair()
    inbox = Inbox(other)
    assert not inbox.stop_requested()
    one.send({'kind': 'stop', 'why': 'preempted'})
    one.send({'kind': 'rendezvous', 'host': 'h', 'port': 1})
    assert inbox.wait_for('rendezvous', 10)['port'] == 1
    assert inbox.stop_requested()
    one.close()
    other.close()

"""The first process of a node: runs the command that Parsl gives, and turns the scheduler's signals into notices.

``python3 -P -m parsl_freetrain.training.node [--holder FILE --job-variable NAME --wait SECONDS] COMMAND ...``

A scheduler that takes nodes sends SIGTERM to all processes there. Parsl's manager would end on it and with it the ranks,
though there are seconds left to save. So what is started here ignores SIGTERM and SIGUSR1, and this process tells the members
that are at work. After SIGTERM it ends the node as soon as none is; after SIGUSR1, a warning, it does not.

Parsl's manager ends in order when it has lost its interchange. With ``--holder`` the node then stays for some time, so that a
run that goes on with the work of the lost one can go on with its nodes, too; see :mod:`parsl_freetrain.training.holder`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parsl_freetrain.training.channel import Channel, is_ours
from parsl_freetrain.training.holder import Succession
from parsl_freetrain.training.linux import die_with_parent, end_session

NOTICE_VARIABLE = 'FREETRAIN_NODE_NOTICE'
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_S = 1.0       # between two looks for a new holder
_FAREWELL_S = 1.0   # for the results of members to reach the executor, through Parsl's manager


def ignore_notices() -> None:
    """From now on this process, and what it starts, does not end on a scheduler's notice."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


def heed_notices() -> None:
    """Undo :func:`ignore_notices`: what is started from here ends on SIGTERM, as programs expect of each other."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_DFL)


def listen_for_notices() -> Channel | None:
    """Be told of the scheduler's notices; None where no such process runs this node.

    Messages are ``{'kind': 'notice', 'signal': 'SIGTERM'}``; while the channel is open, the node is not ended.
    """
    name = os.environ.get(NOTICE_VARIABLE)
    if not name:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f'\0{name}'.encode())
    except OSError:
        sock.close()
        return None
    if not is_ours(sock):
        sock.close()
        return None
    return Channel(sock)


class Node:
    """Runs one command for as long as it lasts, and after it those of later holders of the node.

    Parameters
    ----------
    command
        Program and arguments.
    succession
        Where later holders tell their commands; None: there are none.
    wait_s
        The node waits so many seconds for the next holder.
    """

    def __init__(self, command: Sequence[str], succession: Succession | None = None, wait_s: float = 0.0) -> None:
        self._command = list(command)
        self._succession = succession
        self._wait_s = wait_s
        self._notice = ''
        self._ending = False
        self._members: dict[int, Channel] = {}
        self._free_since = 0.0
        self._name = f'parsl-freetrain-node-{os.geteuid()}-{secrets.token_hex(8)}'
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f'\0{self._name}'.encode())
        self._listener.listen(64)
        self._wake, wake = socket.socketpair()
        self._wake.setblocking(False)
        wake.setblocking(False)
        self._wake_writer = wake

    def run(self) -> int:
        """The last command's exit status, or 128 + SIGTERM when the node was ended on SIGTERM."""
        for number in NOTICES:
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        # A job that waited in the queue while its run died may have a new holder before it starts.
        command = self._claim() or self._command
        while True:
            status = self._run(command)
            if status or self._ending or self._succession is None:
                return status
            end_session()   # nothing of the lost run works on beside the next one
            following = self._wait_for_holder()
            if following is None:
                return 128 + signal.SIGTERM if self._ending else status
            command = following

    def _claim(self) -> list[str] | None:
        claim = self._succession.claim() if self._succession is not None else None
        return ['/bin/bash', '-c', claim] if claim is not None else None

    def _wait_for_holder(self) -> list[str] | None:
        end = time.monotonic() + self._wait_s
        print(f'The run of this node is gone; waiting {self._wait_s:g} s for one that goes on.', file=sys.stderr, flush=True)
        while time.monotonic() < end and not self._ending:
            if command := self._claim():
                return command
            select.select([self._wake], [], [], _LOOK_S)
        return None

    def _run(self, command: Sequence[str]) -> int:
        process = subprocess.Popen(command, env={**os.environ, NOTICE_VARIABLE: self._name}, preexec_fn=_before_the_command)
        child = os.pidfd_open(process.pid)
        poll = select.poll()
        for fd in (child, self._listener.fileno(), self._wake.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(100 if self._ending else None)}
            if child in ready:
                return _status(process.wait())
            if self._listener.fileno() in ready:
                self._admit(poll)
            if self._wake.fileno() in ready:
                self._tell()
            for fd in ready & self._members.keys():
                self._hear(fd, poll)
            if self._ending and not self._members and time.monotonic() >= self._free_since + _FAREWELL_S:
                process.kill()
                process.wait()
                return 128 + signal.SIGTERM

    def _on_signal(self, number: int, _: object) -> None:
        self._notice = signal.Signals(number).name
        self._ending = self._ending or number == signal.SIGTERM

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        if self._notice:
            for channel in self._members.values():
                channel.send({'kind': 'notice', 'signal': self._notice}, wait=False)

    def _admit(self, poll: select.poll) -> None:
        connection, _ = self._listener.accept()
        if not is_ours(connection):
            connection.close()
            return
        channel = Channel(connection)
        self._members[channel.fileno()] = channel
        poll.register(channel.fileno(), select.POLLIN)
        if self._notice:
            channel.send({'kind': 'notice', 'signal': self._notice}, wait=False)

    def _hear(self, fd: int, poll: select.poll) -> None:
        try:
            self._members[fd].recv()
        except (EOFError, ValueError):
            poll.unregister(fd)
            self._members.pop(fd).close()
            self._free_since = time.monotonic()


def _before_the_command() -> None:
    die_with_parent()
    ignore_notices()


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 if there is none."""
    parser = argparse.ArgumentParser(add_help=False, usage=(
        'python3 -P -m parsl_freetrain.training.node [--holder FILE --job-variable NAME --wait SECONDS] COMMAND ...'))
    parser.add_argument('--holder', type=Path)
    parser.add_argument('--job-variable', default='')
    parser.add_argument('--wait', type=float, default=0.0)
    parser.add_argument('command', nargs=argparse.REMAINDER)
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if not given.command:
        parser.print_usage(sys.stderr)
        return 2
    job = os.environ.get(given.job_variable, '')
    return Node(given.command, Succession(given.holder, job) if given.holder and job else None, given.wait).run()


if __name__ == '__main__':
    sys.exit(main())

"""The first process of a node: it runs Parsl's command, and turns signals into notices. ``python3
-P -m parsl_freetrain.training.process.node_agent COMMAND ...`` takes before the command ``--holder
FILE --job-variable NAME --wait SECONDS`` and ``--template FOLDER``. A scheduler that takes nodes
away sends SIGTERM to all of their processes, on which Parsl's manager and the ranks would end, with
seconds left to save. So all processes started here ignore SIGTERM and SIGUSR1 (a warning only), and
this one notifies the members at work; it ends the node once none is, by SIGTERM or :func:`leave`. A
scheduler may stop or kill nothing but the shell that its launcher has started
(:mod:`parsl_freetrain.sites.batch.shell`): this process ends with it, and what was started here
with this process. With ``--template`` a template of fork servers imports torch meanwhile, and logs
to that folder. With ``--holder`` the node stays for some time without an interchange, so that a
later run can adopt it (:mod:`~.process.block_lease`).
"""

import argparse
import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parsl_freetrain.host.leftovers import remove_leftovers
from parsl_freetrain.host.processes import start_of
from parsl_freetrain.training.process.block_lease import LeasedCommands
from parsl_freetrain.training.process.channel import Channel, connect, is_ours, listen
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.linux import adopt_orphans, die_with_parent, end_descendants
from parsl_freetrain.training.spec.messages import Decoder, Leave, Notice

NOTICE_VARIABLE = 'FREETRAIN_NODE_NOTICE'
TEMPLATE_VARIABLE = 'FREETRAIN_NODE_TEMPLATE'
SHELL_VARIABLE = 'FREETRAIN_NODE_SHELL'
ENVIRONMENT_VARIABLE = 'FREETRAIN_ENVIRONMENT'
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_S = 1.0  # between two checks for a new holder
_FAREWELL_S = 1.0  # for members' results to reach the executor, through Parsl's manager


def ignore_notices() -> None:
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


def heed_notices() -> None:
    """Undo :func:`ignore_notices`: programs started from here expect to end on SIGTERM."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_DFL)


def template_of_node() -> str | None:
    """The template that this node's first process, or who started that one, has started."""
    name = os.environ.get(TEMPLATE_VARIABLE)
    sock = connect(name) if name else None
    if sock is None:
        return None
    sock.close()
    return name


def listen_for_notices() -> Channel[Notice] | None:
    """None if no such process runs this node. While the channel is open, the node is not ended."""
    name = os.environ.get(NOTICE_VARIABLE)
    sock = connect(name) if name else None
    if sock is None:
        return None
    if not is_ours(sock):
        sock.close()
        return None
    return Channel(sock, Decoder[Notice](Notice, "the node's first process"))


def leave() -> None:
    """Have the first process of this node, if any, end it once no member is at work."""
    channel = listen_for_notices()
    if channel is not None:
        channel.send(Leave())
        channel.close()


class NodeAgent:
    """Runs one command, then those of later holders (``leased``), each after ``wait_s`` at most."""

    def __init__(
        self, command: Sequence[str], leased: LeasedCommands | None = None, wait_s: float = 0.0
    ) -> None:
        self._command = list(command)
        self._leased, self._wait_s = leased, wait_s
        self._notice = ''
        self._ending = False
        self._left = False  # nothing that ran here is waited for
        self._members: dict[int, Channel[Leave]] = {}
        self._decoder: Decoder[Leave] = Decoder(Leave, 'a process of this node')
        self._free_since = 0.0
        self._name = f'node-{secrets.token_hex(8)}'
        listener = listen(self._name)
        assert listener is not None  # the name is new
        self._listener = listener
        self._wake, self._wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_writer.setblocking(False)

    def run(self) -> int:
        """The last command's exit status; 128 + SIGTERM if that ended the node, 0 if left."""
        for number in NOTICES:
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        # If the run died while the job was queued, the job may have a new holder before it starts.
        command = self._claim() or self._command
        while True:
            status = self._run(command)
            if status or self._ending or self._left or self._leased is None:
                return status
            end_descendants()  # nothing of the lost run may run next to the next one
            following = self._wait_for_holder()
            if following is None:
                return 128 + signal.SIGTERM if self._ending else status
            command = following

    def _claim(self) -> list[str] | None:
        claim = self._leased.claim() if self._leased is not None else None
        return ['/bin/bash', '-c', claim] if claim is not None else None

    def _wait_for_holder(self) -> list[str] | None:
        end = time.monotonic() + self._wait_s
        said = f'The run of this node is gone; waiting {self._wait_s:g} s for one that goes on.'
        print(said, file=sys.stderr, flush=True)
        while time.monotonic() < end and not self._ending:
            if command := self._claim():
                return command
            select.select([self._wake], [], [], _LOOK_S)
        return None

    def _run(self, command: Sequence[str]) -> int:
        process = subprocess.Popen(
            command, env={**os.environ, NOTICE_VARIABLE: self._name}, preexec_fn=_before_the_command
        )
        child = os.pidfd_open(process.pid)
        poll = select.poll()
        for fd in (child, self._listener.fileno(), self._wake.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(100 if self._ending else None)}
            if child in ready:
                code = process.wait()
                return code if code >= 0 else 128 - code
            if self._listener.fileno() in ready:
                self._admit(poll)
            if self._wake.fileno() in ready:
                self._notify()
            for fd in ready & self._members.keys():
                self._handle(fd, poll)
            said_all = self._ending and time.monotonic() >= self._free_since + _FAREWELL_S
            if not self._members and (self._left or said_all):
                process.kill()
                process.wait()
                return 128 + signal.SIGTERM if self._ending else 0

    def _on_signal(self, number: int, _: object) -> None:
        self._notice = signal.Signals(number).name
        self._ending = self._ending or number == signal.SIGTERM

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        if self._notice:
            for channel in self._members.values():
                channel.send(Notice(self._notice), wait=False)

    def _admit(self, poll: select.poll) -> None:
        connection, _ = self._listener.accept()
        if not is_ours(connection):
            connection.close()
            return
        channel = Channel(connection, self._decoder)
        self._members[channel.fileno()] = channel
        poll.register(channel.fileno(), select.POLLIN)
        if self._notice:
            channel.send(Notice(self._notice), wait=False)

    def _handle(self, fd: int, poll: select.poll) -> None:
        try:
            self._left = self._members[fd].recv() is not None or self._left
        except EOFError:
            poll.unregister(fd)
            self._members.pop(fd).close()
            self._free_since = time.monotonic()


def end_with_shell() -> bool:
    """End when this node's shell, if one has started this process, ends; False: it has ended."""
    shell = os.environ.pop(SHELL_VARIABLE, '')
    if not shell:
        return True
    signal.signal(signal.SIGHUP, _end_at_once)
    die_with_parent(signal.SIGHUP)  # the shell, or one that it has started to run this program
    return start_of(int(shell)) != ''


def _end_at_once(*_: object) -> None:
    end_descendants()
    remove_leftovers()
    os._exit(128 + signal.SIGHUP)


def _before_the_command() -> None:
    die_with_parent()
    ignore_notices()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        add_help=False,
        usage=(
            'python3 -P -m parsl_freetrain.training.process.node_agent '
            '[--template FOLDER] [--holder FILE --job-variable NAME --wait SECONDS] COMMAND ...'
        ),
    )
    parser.add_argument('--template', type=Path)
    parser.add_argument('--holder', type=Path)
    parser.add_argument('--job-variable', default='')
    parser.add_argument('--wait', type=float, default=0.0)
    parser.add_argument('command', nargs=argparse.REMAINDER)
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if not given.command:
        parser.print_usage(sys.stderr)
        return 2
    if not end_with_shell():
        return 128 + signal.SIGKILL
    adopt_orphans()
    job = os.environ.get(given.job_variable, '')
    # Several nodes may be one computer, and share a template.
    if given.template and not template_of_node():
        _start_template(given.template)
    try:
        leased = LeasedCommands(given.holder, job) if given.holder and job else None
        return NodeAgent(given.command, leased, given.wait).run()
    finally:
        end_descendants()
        remove_leftovers()  # a manager that is killed does not tidy up
        unpacked = Path(os.environ.get(ENVIRONMENT_VARIABLE, ''))
        if unpacked.name.startswith('freetrain-environment-'):
            shutil.rmtree(unpacked, ignore_errors=True)


def _start_template(folder: Path) -> None:
    """Without it, the node's fork server imports torch later."""
    name = f'template-{secrets.token_hex(8)}'
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = str(folder / f'{name}.log')
        ForkClient.start_template(name, os.getpid(), log, new_session=False)
    except OSError as error:
        print(f'torch is not imported ahead: {error}', file=sys.stderr, flush=True)
        return
    os.environ[TEMPLATE_VARIABLE] = name


if __name__ == '__main__':
    sys.exit(main())

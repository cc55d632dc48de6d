"""Several computers on one, joined by a bridge: own network, host name and ``/dev/shm``."""

from __future__ import annotations

import fcntl
import os
import random
import select
import shlex
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

INTERFACE = 'wire'
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002


@dataclass(frozen=True)
class Computer:
    """One of them; ``address`` is that of its interface 'wire'."""

    name: str
    address: str
    _bridge: str
    _wires: list[Wire] = field(default_factory=list)

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs a command there."""
        return ['sh', '-c', on_computer(self.name, words)]

    def cut_off(self) -> None:
        """Let all packets to and from it vanish; no connection is closed."""
        _run('ip', '-n', self._bridge, 'link', 'set', f'to-{self.name}', 'down')

    def join_again(self) -> None:
        """Undo :meth:`cut_off`."""
        _run('ip', '-n', self._bridge, 'link', 'set', f'to-{self.name}', 'up')

    def bad_line(self, delay_ms: int, loss_percent: float) -> None:
        """Delay and lose some of what it sends and receives. Call it before anything runs there."""
        _run('ip', '-n', self.name, 'link', 'del', INTERFACE)
        inner, outer = _tap(self.name, INTERFACE), _tap(self._bridge, f'to-{self.name}')
        self._connect()
        self._wires.append(Wire(inner, outer, delay_ms / 1000, loss_percent / 100))

    def _connect(self) -> None:
        """Plug both ends of its wire in."""
        name, bridge = self.name, self._bridge
        _run('ip', '-n', bridge, 'link', 'set', f'to-{name}', 'master', 'bridge0', 'up')
        _run('ip', '-n', name, 'addr', 'add', f'{self.address}/24', 'dev', INTERFACE)
        _run('ip', '-n', name, 'link', 'set', INTERFACE, 'up')


class Wire:
    """Carries frames between two TAP devices, late and not all: few kernels have netem."""

    def __init__(self, inner: int, outer: int, delay_s: float, loss: float) -> None:
        self._ends = {inner: (outer, delay_s), outer: (inner, 0.0)}
        self._loss = loss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, name='wire')
        self._thread.start()

    def close(self) -> None:
        """End it, and its devices."""
        self._over.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        draw, late = random.Random(1), deque[tuple[float, int, bytes]]()
        while not self._over.is_set():
            wait_s = max(0.0, late[0][0] - time.monotonic()) if late else 0.1
            for end in select.select(list(self._ends), [], [], wait_s)[0]:
                frame = os.read(end, 65536)
                to, delay_s = self._ends[end]
                if draw.random() < self._loss:
                    continue
                if delay_s:
                    late.append((time.monotonic() + delay_s, to, frame))
                else:
                    _put(to, frame)
            while late and late[0][0] <= time.monotonic():
                _, to, frame = late.popleft()
                _put(to, frame)


def _put(end: int, frame: bytes) -> None:
    with suppress(OSError):  # as long as the computer is cut off
        os.write(end, frame)


def _tap(namespace: str, name: str) -> int:
    """A new network interface, and the file that has its frames."""
    end = os.open('/dev/net/tun', os.O_RDWR | os.O_CLOEXEC)
    own = f'ft{os.getpid()}t{end}'
    fcntl.ioctl(end, _TUNSETIFF, struct.pack('16sH', own.encode(), _TAP_WITHOUT_HEADER))
    _run('ip', 'link', 'set', own, 'netns', namespace, 'name', name)
    return end


def on_computer(name: str, words: Sequence[str]) -> str:
    """The shell command that runs ``words`` on a computer; ``name`` may be a quoted variable."""
    become = 'hostname "$0" && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@"'
    inside = ['unshare', '--uts', '--ipc', '--mount', 'sh', '-c', become]
    return f'exec ip netns exec {name} {shlex.join(inside)} {name} {shlex.join(words)}'


@contextmanager
def computers(count: int) -> Iterator[list[Computer]]:
    """Two or more computers, 10.99.0.1 and so on; skips the test where none can be made."""
    if os.geteuid() or shutil.which('ip') is None:
        pytest.skip('needs root and ip, to make networks of its own')
    bridge = f'ft{os.getpid()}'
    found = [Computer(f'{bridge}n{i}', f'10.99.0.{i}', bridge) for i in range(1, count + 1)]
    try:
        try:
            _run('ip', 'netns', 'add', bridge)
            _run('ip', '-n', bridge, 'link', 'add', 'name', 'bridge0', 'type', 'bridge')
        except subprocess.CalledProcessError as error:
            pytest.skip(f'networks cannot be made here: {error.stderr.decode()}')
        _run('ip', '-n', bridge, 'link', 'set', 'bridge0', 'up')
        for computer in found:
            name, port = computer.name, f'to-{computer.name}'
            _run('ip', 'netns', 'add', name)
            peer = ['peer', 'name', INTERFACE, 'netns', name]
            _run('ip', '-n', bridge, 'link', 'add', 'name', port, 'type', 'veth', *peer)
            computer._connect()
            _run('ip', '-n', name, 'link', 'set', 'lo', 'up')
        yield found
    finally:
        for wire in (wire for computer in found for wire in computer._wires):
            wire.close()
        for name in (bridge, *(computer.name for computer in found)):
            with suppress(subprocess.CalledProcessError):
                _run('ip', 'netns', 'del', name)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)

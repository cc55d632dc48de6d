"""Several computers on one: network, host name and shared memory of their own, joined by a bridge.

They share the file system and the process ids, as nodes of a cluster share their home folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

INTERFACE = 'wire'


@dataclass(frozen=True)
class Computer:
    """One of them; ``address`` is that of its interface 'wire'."""

    name: str
    address: str
    _bridge: str

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs a command there."""
        become = f'hostname {self.name} && exec "$@"'
        inside = ['unshare', '--uts', '--ipc', 'sh', '-c', become, 'sh', *words]
        return ['ip', 'netns', 'exec', self.name, *inside]

    def cut_off(self) -> None:
        """Let all packets to and from it vanish; no connection is closed."""
        _run('ip', '-n', self._bridge, 'link', 'set', f'to-{self.name}', 'down')

    def join_again(self) -> None:
        """Undo :meth:`cut_off`."""
        _run('ip', '-n', self._bridge, 'link', 'set', f'to-{self.name}', 'up')

    def bad_line(self, delay_ms: int, loss_percent: float) -> None:
        """Delay what it sends, and lose some of it; skips the test where the kernel cannot."""
        shaped = ['netem', 'delay', f'{delay_ms}ms', 'loss', f'{loss_percent}%']
        try:
            _run('tc', '-n', self.name, 'qdisc', 'add', 'dev', INTERFACE, 'root', *shaped)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f'this kernel cannot shape traffic: {getattr(error, "stderr", error)}')


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
            _run('ip', '-n', bridge, 'link', 'set', port, 'master', 'bridge0', 'up')
            _run('ip', '-n', name, 'addr', 'add', f'{computer.address}/24', 'dev', INTERFACE)
            _run('ip', '-n', name, 'link', 'set', INTERFACE, 'up')
            _run('ip', '-n', name, 'link', 'set', 'lo', 'up')
        yield found
    finally:
        for name in (bridge, *(computer.name for computer in found)):
            with suppress(subprocess.CalledProcessError):
                _run('ip', 'netns', 'del', name)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)

"""The processes of a system: started, found by node, killed, and none left at the end."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.benchmarks.versus.constants import LOG_VARIABLE, NODE_VARIABLE

ROOT = Path(__file__).resolve().parents[3]
PEERS = ROOT / '.venv-versus'
_PR_SET_CHILD_SUBREAPER = 36
_NODE_VARIABLES = (NODE_VARIABLE, 'FREETRAIN_NODE')  # the second is that of the local site


@dataclass(frozen=True)
class Step:
    """A step as one rank saw it; times in seconds of ``time.time()``, CPU time in seconds."""

    node: str
    pid: int
    begun: float
    ended: float
    cpu_s: float
    position: int
    world: int
    digest: str | None


@dataclass
class Machine:
    """A folder, and all processes started for it, orphans too."""

    folder: Path
    _read: dict[Path, int] = field(default_factory=dict)
    _steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.log.mkdir(parents=True)
        self._before = set(psutil.Process().children(recursive=True))

    @property
    def log(self) -> Path:
        return self.folder / 'steps'

    def run(
        self,
        command: Sequence[str],
        node: str = '',
        environment: Mapping[str, str] | None = None,
        *,
        python: Path = Path(sys.executable),
    ) -> subprocess.Popen[bytes]:
        """Start a program (without a slash: ``python``'s own), as a node's if one is named."""
        bin_ = python.parent
        program = command[0] if '/' in command[0] else str(bin_ / command[0])
        given = {
            'PATH': f'{bin_}{os.pathsep}{os.environ["PATH"]}',
            'PYTHONPATH': str(ROOT),
            'OMP_NUM_THREADS': '1',
            'GLOO_SOCKET_IFNAME': 'lo',
            LOG_VARIABLE: str(self.log),
            **({NODE_VARIABLE: node} if node else {}),
            **(environment or {}),
        }
        with (self.folder / f'{node or "system"}.log').open('ab') as output:
            return subprocess.Popen(
                [program, *command[1:]],
                cwd=self.folder,
                env=os.environ | given,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def steps(self) -> list[Step]:
        """All steps so far."""
        for path in sorted(self.log.glob('*.jsonl')):
            node, pid, _, _ = path.name.split('.')
            with path.open('rb') as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if line.endswith(b'\n'):
                        self._read[path] = self._read.get(path, 0) + len(line)
                        self._steps.append(Step(node, int(pid), *json.loads(line)))
        return self._steps

    def rank(self, node: str) -> list[psutil.Process]:
        """The process that made the node's last step; none where it has ended."""
        last = max((s for s in self.steps() if s.node == node), key=lambda s: s.ended, default=None)
        with contextlib.suppress(psutil.Error):
            return [psutil.Process(last.pid)] if last else []
        return []

    def of_node(self, node: str) -> list[psutil.Process]:
        """The processes of a node, with all that they have started."""
        found: dict[int, psutil.Process] = {}
        for process in self.started():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                if node in map(environment.get, _NODE_VARIABLES):
                    for one in (process, *process.children(recursive=True)):
                        found[one.pid] = one
        return list((found | {one.pid: one for one in self.rank(node)}).values())

    def started(self) -> list[psutil.Process]:
        now = psutil.Process().children(recursive=True)
        return [process for process in now if process not in self._before]

    def end(self) -> None:
        """Kill all that were started."""
        while found := self.started():
            kill(found)
            for process in found:
                with contextlib.suppress(ChildProcessError, psutil.Error):
                    os.waitpid(process.pid, os.WNOHANG)
            time.sleep(0.01)


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL them, as nearly at once as can be."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """A machine that is empty at the end, however that comes."""
    made = Machine(folder)
    try:
        yield made
    finally:
        made.end()

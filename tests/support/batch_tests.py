"""Test machines with PBS, Cobalt and LSF, as fixtures: with jobs of other users, faults, failing
nodes, and a clock that can be moved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_machine import OVER, ROOT, RUNNING, Machine, install
from tests.support.waiting import LIMIT_S

Job = dict[str, Any]


class Rehearsal(Machine):
    """Nodes ``x0001`` to ``x0004``, the queues batch, debug (at most 2 nodes, 10 minutes) and
    preemptable.
    """

    def job(self, number: str) -> Job:
        with self.state() as state:
            found: Job = state['jobs'][number.split('.')[0]]
            return found

    def jobs(self) -> dict[str, Job]:
        with self.state() as state:
            return dict(state['jobs'])

    def others(
        self,
        nodes: int,
        walltime_s: float = 600.0,
        seconds: float | None = None,
        queue: str = 'batch',
    ) -> str:
        """Submit a job of another user; it lasts for its whole walltime, or for ``seconds``."""
        with self.state() as state:
            return self.submit(
                state, nodes=nodes, walltime_s=walltime_s, seconds=seconds, queue=queue
            )

    def finish(self, number: str, how: str = '') -> None:
        with self.state() as state:
            self.end(state, number, how)

    def set_node(self, name: str, **what: Any) -> None:
        with self.state() as state:
            state['nodes'][name].update(what)

    def reserve(self, nodes: list[str], start: float, end: float) -> None:
        with self.state() as state:
            state['reservations'].append(
                {
                    'name': f'R{len(state["reservations"]) + 1}',
                    'nodes': nodes,
                    'start': start,
                    'end': end,
                }
            )

    def move_clock(self, seconds: float) -> None:
        with self.state() as state:
            state['offset'] += seconds

    def calls(self) -> dict[str, int]:
        with self.state() as state:
            return dict(state['calls'])

    @contextmanager
    def fault(
        self, name: str, status: int = 0, says: str = '', hang: bool = False
    ) -> Iterator[None]:
        """Make one command, or 'all', hang or end with a status."""
        with self.state() as state:
            state['faults'][name] = 'hang' if hang else {'status': status, 'says': says}
        try:
            yield
        finally:
            with self.state() as state:
                del state['faults'][name]

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f'did not come true within {limit_s} s\n{self.jobs()}'
            time.sleep(0.05)

    def clear(self) -> None:
        """End all jobs."""

        def over() -> bool:
            with self.state() as state:
                for number, job in state['jobs'].items():
                    if job['state'] != OVER:
                        self.end(state, number, 'deleted')
                return all(job['state'] == OVER for job in state['jobs'].values())

        self.wait(over)

    def running(self) -> list[str]:
        return [number for number, job in self.jobs().items() if job['state'] == RUNNING]


def rehearsal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, nodes: dict[str, dict[str, Any]]
) -> Iterator[Rehearsal]:
    """A machine whose commands, those of a module here, come first in PATH."""
    machine = Rehearsal(folder)
    machine.create(
        nodes,
        {
            'batch': {},
            'debug': {'most': 2, 'longest_s': 600},
            'preemptable': {'preemptable': True},
            'closed': {'enabled': 'False'},
        },
    )
    monkeypatch.setenv('PATH', str(install(machine, module)), prepend=os.pathsep)
    yield machine
    machine.clear()


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Four idle nodes with PBS."""
    nodes = {
        f'x{number:04}': {'has': {'ngpus': 2, 'system': 'rehearsal'}} for number in (1, 2, 3, 4)
    }
    yield from rehearsal(tmp_path / 'pbs', monkeypatch, 'pbs_commands', nodes)


@pytest.fixture
def cobalt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Four idle nodes with Cobalt."""
    has = {'mcdram': 'cache', 'numa': 'quad'}
    nodes = {f'nid{number:05}': {'has': dict(has)} for number in range(20, 24)}
    yield from rehearsal(tmp_path / 'cobalt', monkeypatch, 'cobalt_commands', nodes)


@pytest.fixture
def lsf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Four idle hosts with LSF, and the package that adds LSF can be found as if installed."""
    monkeypatch.syspath_prepend(str(ROOT / 'tests' / 'sites' / 'lsf_example'))
    nodes: dict[str, dict[str, Any]] = {f'host{number}': {} for number in range(4)}
    yield from rehearsal(tmp_path / 'lsf', monkeypatch, 'lsf_commands', nodes)

"""Test machines with Cobalt and LSF, as fixtures, with faults; and the commands of an idle PBS."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_machine import OVER, ROOT, RUNNING, Machine, install
from tests.support.waiting import LIMIT_S, looks

Job = dict[str, Any]


class Rehearsal(Machine):
    """The queues batch, debug (at most 2 nodes, 10 minutes), preemptable and closed."""

    def job(self, number: str) -> Job:
        with self.state() as state:
            found: Job = state['jobs'][number.split('.')[0]]
            return found

    def jobs(self) -> dict[str, Job]:
        with self.state() as state:
            return dict(state['jobs'])

    def others(self, nodes: int, walltime_s: float = 600.0, seconds: float | None = None) -> str:
        """Submit a job of another user; it lasts for its whole walltime, or for ``seconds``."""
        with self.state() as state:
            return self.submit(state, nodes=nodes, walltime_s=walltime_s, seconds=seconds)

    def finish(self, number: str, how: str = '') -> None:
        with self.state() as state:
            self.end(state, number, how)

    def set_node(self, name: str, **what: Any) -> None:
        with self.state() as state:
            state['nodes'][name].update(what)

    def reserve(self, nodes: list[str], start: float, end: float) -> None:
        with self.state() as state:
            name = f'R{len(state["reservations"]) + 1}'
            state['reservations'].append({'name': name, 'nodes': nodes, 'start': start, 'end': end})

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
        for _ in looks(limit_s):
            if condition():
                return
        raise AssertionError(f'did not come true within {limit_s} s\n{self.jobs()}')

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
            'preemptable': {},
            'closed': {'enabled': 'False'},
        },
    )
    monkeypatch.setenv('PATH', str(install(machine, module)), prepend=os.pathsep)
    yield machine
    machine.clear()


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PBS's commands as on four idle nodes; one that submits or deletes leaves ``called``."""
    queues = {name: {'enabled': 'True', 'started': 'True'} for name in ('batch', 'preemptable')}
    has = [{'ncpus': 8, 'ngpus': 4, 'system': 'polaris'}] * 3 + [{'ncpus': 8, 'ngpus': 2}]
    nodes = {f'x{n:04}': {'state': 'free', 'resources_available': e} for n, e in enumerate(has, 1)}
    queues_said, nodes_said = json.dumps({'Queue': queues}), json.dumps({'nodes': nodes})
    no_jobs = json.dumps({'Jobs': {}})
    folder = tmp_path / 'pbs'
    folder.mkdir()
    for name, text in (
        ('qstat', f"case $* in --version) echo 'pbs_version = 2022.1.1' ;; "
         f"-Q*) echo '{queues_said}' ;; *) echo '{no_jobs}' ;; esac"),
        ('pbsnodes', f"echo '{nodes_said}'"),
        ('pbs_rstat', ':'),
        *((name, f"touch '{folder}/called'; exit 1") for name in ('qsub', 'qdel')),
    ):  # fmt: skip
        (folder / name).write_text(f'#!/bin/sh\n{text}\n')
        (folder / name).chmod(0o700)
    monkeypatch.setenv('PATH', str(folder), prepend=os.pathsep)
    return folder


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

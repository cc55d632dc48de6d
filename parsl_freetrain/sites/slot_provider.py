"""Blocks of the local site as Parsl sees them: a launcher and a provider that use no shell tools."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsl.jobs.states import JobState, JobStatus
from parsl.launchers.base import Launcher
from parsl.providers import LocalProvider
from parsl.providers.errors import SubmitException

from parsl_freetrain.sites import slots

logger = logging.getLogger(__name__)

_CANCEL_WAIT_S = 10.0


class SlotLauncher(Launcher):
    """Runs the command once on each named slot of this computer, through :mod:`parsl_freetrain.sites.slots`.

    Parameters
    ----------
    nodes
        The slots' names.
    end
        When they are taken, in seconds of ``time.time()``; None: never.
    owner
        Process id of the process that must live for the block to live; default: this one.
    """

    def __init__(self, nodes: Sequence[str] = (), end: float | None = None, owner: int | None = None) -> None:
        super().__init__()
        self.nodes = nodes
        self.end = end
        self.owner = os.getpid() if owner is None else owner

    def __call__(self, command: str, tasks_per_node: int, nodes_per_block: int, script_dir: str = '') -> str:
        """One shell line; ``$JOBNAME`` is set by Parsl's local provider above it."""
        words = [sys.executable, '-P', os.path.abspath(slots.__file__), '--folder', os.path.abspath(script_dir),
                 '--owner', f'{self.owner}:{slots.identity(self.owner)}']
        if self.end is not None:
            words += ['--end', repr(self.end)]
        for node in self.nodes:
            words += ['--node', node]
        # exec: the block's process is the one that the provider has started, and signals reach it directly.
        return f'exec {shlex.join(words)} --job-name "$JOBNAME" -- {shlex.quote(command)}\n'


@dataclass
class _Job:
    name: str
    process: subprocess.Popen[bytes]
    script: Path
    cancelled: bool = False
    last: JobStatus | None = None


class SlotProvider(LocalProvider):
    """Parsl's LocalProvider without its shell commands.

    It needs no ``ps``, bears any character in the run directory's path, sees the exit status of the very process it
    started instead of asking for a number that may have been given anew, and after a cancel the nodes
    are gone when the call returns.
    """

    def __init__(self, worker_init: str = '') -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            launcher=SlotLauncher(), init_blocks=0, min_blocks=0, max_blocks=1_000_000, parallelism=0, worker_init=worker_init)
        self._jobs: dict[str, _Job] = {}

    def submit(self, command: str, tasks_per_node: int, job_name: str = 'parsl.localprovider') -> str:
        """Start a block with the launcher as it is now; returns the job's id."""
        name = f'{job_name}.{time.time():.6f}'.replace('/', '_')
        folder = Path(self.script_dir or '.').absolute()
        script = folder / f'{name}.sh'
        text = (f'{self.worker_init}\nexport JOBNAME={shlex.quote(name)}\n'
                + self.launcher(command, tasks_per_node, self.nodes_per_block, str(folder)))
        try:
            with _private(script) as file:
                file.write(text.encode())
            with _private(_beside(script, '.out')) as out, _private(_beside(script, '.err')) as err:
                process = subprocess.Popen(
                    ['/bin/bash', str(script)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            raise SubmitException(  # type: ignore[no-untyped-call]
                name, f'The block could not be started: {error}') from error
        job_id = str(process.pid)
        while job_id in self._jobs:
            job_id += '+'
        self._jobs[job_id] = _Job(name, process, script)
        return job_id

    def status(self, job_ids: Sequence[Any]) -> list[JobStatus]:
        """How the jobs are; TIMEOUT for a block whose nodes were taken."""
        return [self._status(self._jobs[str(job_id)]) for job_id in job_ids]

    def _status(self, job: _Job) -> JobStatus:
        if job.last is not None:
            return job.last
        code = job.process.poll()
        if code is None:
            return JobStatus(JobState.RUNNING)
        state, message = self._ending(job, code)
        job.last = JobStatus(state, message, exit_code=code, stdout_path=str(_beside(job.script, '.out')),
                             stderr_path=str(_beside(job.script, '.err')))
        return job.last

    def _ending(self, job: _Job, code: int) -> tuple[JobState, str]:
        try:
            how = json.loads(slots.end_file(job.script.parent, job.name).read_text())['how']
        except (OSError, ValueError, KeyError):
            # Whatever killed it left its nodes alone.
            slots.kill_block(job.script.parent, job.name)
            if job.cancelled:
                return JobState.CANCELLED, slots.CANCELLED
            return JobState.FAILED, f'the process of the block ended by itself with status {code}'
        if how == slots.TAKEN:
            return JobState.TIMEOUT, how
        if how in (slots.CANCELLED, slots.ORPHANED):
            return JobState.CANCELLED, how
        return (JobState.COMPLETED, how) if code == 0 else (JobState.FAILED, f'the command ended with status {code}')

    def cancel(self, job_ids: Sequence[Any]) -> list[bool]:
        """End the jobs; when it returns, no process of theirs is left."""
        jobs = [self._jobs[str(job_id)] for job_id in job_ids]
        for job in jobs:
            if job.process.poll() is None:
                job.cancelled = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _CANCEL_WAIT_S
        for job in jobs:
            try:
                job.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning('Block %s did not end on SIGTERM within %g s; killing it', job.name, _CANCEL_WAIT_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()
            self._status(job)
        return [True] * len(jobs)


def _beside(script: Path, suffix: str) -> Path:
    return script.with_name(script.name + suffix)


def _private(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 'wb')

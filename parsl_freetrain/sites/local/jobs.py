"""The blocks of the local site: one process each, which runs a command once per slot."""

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.host import files
from parsl_freetrain.host.processes import start_of
from parsl_freetrain.sites.local import slots

logger = logging.getLogger(__name__)

_CANCEL_WAIT_S = 10.0


@dataclass
class _SlotJob:
    name: str
    process: subprocess.Popen[bytes]
    script: Path
    cancelled: bool = False
    last: JobStatus | None = None


class SlotJobs:
    """Blocks of this process: without ``ps``, any path, the true exit status, nothing left."""

    def __init__(self) -> None:
        self._jobs: dict[str, _SlotJob] = {}

    def start(
        self,
        folder: Path,
        name: str,
        nodes: Sequence[str],
        end: float | None,
        command: str,
        worker_init: str = '',
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ) -> str:
        """Start a block; returns the id of its job, or raises FreeTrainError. ``nodes``: its slots;
        ``end``: when they are taken away (``time.time()``; None: never); ``command``: what each
        runs; ``worker_init``: runs once before; ``variables``: of the environment, by slot.
        """
        name = f'{name}.{time.time():.6f}'.replace('/', '_')
        script = folder / f'{name}.sh'
        owner = os.getpid()
        how = [str(folder), name, end, [owner, start_of(owner)], variables or {}, list(nodes)]
        # exec'd, so that signals reach it.
        program = sys.executable, '-P', os.path.abspath(slots.__file__)
        block = shlex.join([*program, json.dumps(how), command])
        logs = [Path(f'{script}{suffix}') for suffix in ('.out', '.err')]
        try:
            with files.create(script) as file:
                file.write(f'{worker_init}\nexec {block}\n'.encode())
            with files.create(logs[0]) as out, files.create(logs[1]) as err:
                process = subprocess.Popen(
                    ['/bin/bash', str(script)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        except OSError as error:
            raise FreeTrainError(f'The block {name} could not be started: {error}.') from error
        job_id = str(process.pid)
        while job_id in self._jobs:
            job_id += '+'
        self._jobs[job_id] = _SlotJob(name, process, script)
        return job_id

    def status(self, job_id: str) -> JobStatus:
        job = self._jobs[job_id]
        if job.last is not None:
            return job.last
        code = job.process.poll()
        if code is None:
            return JobStatus(JobState.RUNNING)
        end = _end_of(job)
        state, message = self._ending(job, code, end.get('how'))
        # What a node prints is not in the block's own output.
        failed = [f'{job.name}.{n}' for n, status in end.get('exit_codes', {}).items() if status]
        printed = job.script.with_name(failed[0] if failed else job.script.name)
        out, err = (f'{printed}{suffix}' for suffix in ('.out', '.err'))
        if state is JobState.FAILED:
            message += f'; its output is in {out} and {err}'
        job.last = JobStatus(state, message, exit_code=code, stdout_path=out, stderr_path=err)
        return job.last

    def _ending(self, job: _SlotJob, code: int, how: str | None) -> tuple[JobState, str]:
        if how is None:  # whatever killed it left its nodes alone
            slots.kill_block(job.script.parent, job.name)
            if job.cancelled:
                return JobState.CANCELLED, slots.CANCELLED
            return JobState.FAILED, f'the process of the block ended by itself with status {code}'
        if how == slots.TAKEN:
            return JobState.TIMEOUT, how
        if how in (slots.CANCELLED, slots.ORPHANED):
            return JobState.CANCELLED, how
        if code == 0:
            return JobState.COMPLETED, how
        return JobState.FAILED, f'the command ended with status {code}'

    def cancel(self, job_ids: Sequence[str]) -> None:
        jobs = [self._jobs[job_id] for job_id in job_ids]
        for job in jobs:
            if job.process.poll() is None:
                job.cancelled = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _CANCEL_WAIT_S
        for job_id, job in zip(job_ids, jobs, strict=True):
            try:
                job.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                said = 'Block %s did not end on SIGTERM within %g s; killing it'
                logger.warning(said, job.name, _CANCEL_WAIT_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()
            self.status(job_id)


def _end_of(job: _SlotJob) -> Any:
    """What the block has written down at its end; empty if it could not."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(slots.end_file(job.script.parent, job.name).read_text())
    return {}

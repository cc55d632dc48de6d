"""What the event loop does and asks through Parsl: blocks, managers, tasks."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from parsl.executors import HighThroughputExecutor
from parsl.executors.high_throughput.executor import HTEXFuture
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.errors import TrainerFailed
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.off_loop import in_thread
from parsl_freetrain.executor.run_lock import RunLock
from parsl_freetrain.sites.provider import BackfillProvider

INTERCHANGE_S = 30.0  # seconds without an answer after which the interchange is considered dead
_LOOK_MS = 200


class ParslSide:
    """The side of a started HighThroughputExecutor, for the event loop's thread."""

    def __init__(self, executor: HighThroughputExecutor, agent: str, lock: RunLock) -> None:
        self._executor, self._agent, self._lock = executor, agent, lock
        self._submitting = threading.Lock()

    def open(self, request: BlockRequest) -> tuple[str, str]:
        """Open a block; returns its block id and job id, or raises the site's errors."""
        executor = self._executor
        assert isinstance(executor.provider, BackfillProvider)
        block_id = str(executor._block_id_counter.get_id())
        command = f'{self._agent} {executor._get_launch_command(block_id)}'
        if request.walltime_s is not None:
            # If --drain_period is given several times, the last one counts.
            command += f' --drain_period={max(1, int(request.walltime_s))}'
        name = f'parsl.{executor.label}.block-{block_id}'
        job_id = executor.provider.open_block(request, command, name)
        self._note_block(block_id, job_id)
        return block_id, job_id

    def register(self, job_id: str) -> tuple[str, str]:
        """Assign a block id to an adopted job; returns it and its nodes' command."""
        block_id = str(self._executor._block_id_counter.get_id())
        self._note_block(block_id, job_id)
        return block_id, self._executor._get_launch_command(block_id)

    def _note_block(self, block_id: str, job_id: str) -> None:
        """Enter a block into Parsl's own records, as its ``scale_out_facade`` does."""
        executor = self._executor
        executor.blocks_to_job_id[block_id] = job_id
        executor.job_ids_to_block[job_id] = block_id
        executor._status[block_id] = JobStatus(JobState.PENDING)
        executor.send_monitoring_info({block_id: executor._status[block_id]})

    def submit(self, context: dict[str, Any], buffer: bytes) -> HTEXFuture:
        """Parsl's own submission, safe for two threads; TrainerFailed without interchange."""
        htex, socket = self._executor, self._executor.outgoing_q.zmq_socket
        with self._submitting:
            socket.sndtimeo = _LOOK_MS  # or Parsl's send would wait for ever
            while True:
                with suppress(zmq.Again):  # it has ended behind the look
                    if socket.poll(_LOOK_MS, zmq.POLLOUT):
                        return HighThroughputExecutor.submit_payload(htex, context, buffer)
                if trouble := self._parsls_trouble():
                    raise TrainerFailed(f'{trouble}.')

    def managers(self) -> list[dict[str, Any]]:
        """Those that are connected. Parsl's own call would wait for ever without an interchange."""
        return self._asked('MANAGERS') or []

    def end_manager(self, name: str) -> None:
        """Have the interchange shut a manager down, which it does with those that are held."""
        self._asked(['HOLD_MANAGER', name])

    def _asked(self, what: object) -> Any:
        """The interchange's answer; None if it cannot give one."""
        ask: Callable[..., Any] = self._executor.command_client.run
        return None if self._parsls_trouble() else ask(what, timeout_s=INTERCHANGE_S)

    def statuses(self) -> dict[str, JobStatus]:
        self._executor._last_poll_time = 0.0  # Parsl compares clocks, which may be set back
        self._executor.poll_facade()
        every = self._executor.status_facade.items()
        return {block: one for block, one in every if one.state is not JobState.SCALED_IN}

    def trouble(self) -> str:
        """A sentence if nothing more can run; else empty."""
        return self._lock.lost or self._parsls_trouble()

    def _parsls_trouble(self) -> str:
        if (interchange := self._executor.interchange_proc) is None:
            return ''
        if interchange.poll() is None:
            answers = self._executor.command_client.ok
            return '' if answers else "Parsl's interchange does not answer any more"
        return (
            f"Parsl's interchange has ended with status {interchange.returncode}; its log is "
            f'{self._executor.logdir}/interchange.log, and a new run continues from the checkpoints'
        )

    def fail_all(self, why: str) -> None:
        """Fail all tasks of Parsl, also those to come. Ordinary apps survive a lost folder."""
        if not self._lock.lost and not self._executor.bad_state_is_set:
            fail = self._executor.set_bad_state_and_fail_all
            in_thread(lambda: fail(TrainerFailed(f'{why}.')), 'FreeTrain-Failing')

"""Blocks, their states and nodes: what the event loop needs of Parsl's HighThroughputExecutor."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from parsl.executors import HighThroughputExecutor
from parsl.executors.high_throughput.executor import HTEXFuture
from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.errors import TrainerFailed
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.block.adoption import Adoption
from parsl_freetrain.sites.provider import BackfillProvider

INTERCHANGE_S = 30.0
"""Seconds without an answer after which the interchange is considered dead."""
_LOOK_MS = 200


class BlockExecutor(HighThroughputExecutor):
    """Opens blocks for requests, and reports their states."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._submitting = threading.Lock()
        self._adoption: Adoption | None = None
        # Where nodes that import torch themselves write their logs; None: they need not.
        self._node_log_dir: str | None = None
        self._environment_command = ''  # what unpacks the nodes' environment

    def _submit_inner(self, context: dict[str, Any], buffer: bytes) -> HTEXFuture:
        """Parsl's own submission. It supports only one thread, but Parsl's thread and the event
        loop both submit here. Without an interchange it would wait for ever. Raises TrainerFailed
        if the interchange is gone.
        """
        with self._submitting:
            while not self.outgoing_q.zmq_socket.poll(_LOOK_MS, zmq.POLLOUT):
                if trouble := self._trouble():
                    raise TrainerFailed(f'{trouble}.')
            return super().submit_payload(context, buffer)

    def _open_block(self, request: BlockRequest) -> tuple[str, str]:
        """Open a block; returns its block id and job id."""
        assert isinstance(self.provider, BackfillProvider)
        assert self._adoption is not None
        block_id = str(self._block_id_counter.get_id())
        template = (
            '' if self._node_log_dir is None else f' --template {shlex.quote(self._node_log_dir)}'
        )
        agent = f'{self._environment_command} {self._adoption.node_command()}{template}'.strip()
        command = f'{agent} {self._get_launch_command(block_id)}'
        if request.walltime_s is not None:
            # If --drain_period is given several times, the last one counts.
            command += f' --drain_period={max(1, int(request.walltime_s))}'
        name = f'parsl.{self.label}.block-{block_id}'
        job_id = self.provider.open_block(request, command, name)
        self._note_block(block_id, job_id)
        return block_id, job_id

    def _register(self, job_id: str) -> tuple[str, str]:
        """Assign a block id to an adopted job; returns it and the command that connects
        its nodes.
        """
        block_id = str(self._block_id_counter.get_id())
        self._note_block(block_id, job_id)
        return block_id, self._get_launch_command(block_id)

    def _note_block(self, block_id: str, job_id: str) -> None:
        """Enter a block into Parsl's own records, as its ``scale_out_facade`` does."""
        self.blocks_to_job_id[block_id], self.job_ids_to_block[job_id] = job_id, block_id
        self._status[block_id] = JobStatus(JobState.PENDING)
        self.send_monitoring_info({block_id: self._status[block_id]})

    def _managers(self) -> list[dict[str, Any]]:
        """The connected managers. Parsl's own call would wait for ever if the interchange
        is gone.
        """
        if self._trouble():
            return []
        ask: Callable[..., list[dict[str, Any]]] = self.command_client.run
        return ask('MANAGERS', timeout_s=INTERCHANGE_S)

    def _end_manager(self, name: str) -> None:
        """Have the interchange shut a manager down, which it does with those that are held."""
        if not self._trouble():
            ask: Callable[..., object] = self.command_client.run
            ask(['HOLD_MANAGER', name], timeout_s=INTERCHANGE_S)

    def _trouble(self) -> str:
        if self.interchange_proc is None:
            return ''
        if self.interchange_proc.poll() is None:
            if self.command_client.ok:
                return ''
            return f"Parsl's interchange has not answered within {INTERCHANGE_S:g} s"
        return (
            f"Parsl's interchange has ended with status {self.interchange_proc.returncode}; "
            f'its log is {self.logdir}/interchange.log, and a new run continues from the '
            'checkpoints'
        )

    def _fail_all(self, why: str) -> None:
        """Fail all tasks that Parsl waits for, and all that are still to come."""
        if not self.bad_state_is_set:
            self.set_bad_state_and_fail_all(TrainerFailed(f'{why}.'))

    def _ask_statuses(self) -> dict[str, JobStatus]:
        self._last_poll_time = 0.0  # Parsl compares clocks, and this one may have been set back
        self.poll_facade()
        return {
            block: status
            for block, status in self.status_facade.items()
            if status.state is not JobState.SCALED_IN
        }

    def status(self) -> dict[str, JobStatus]:
        """The provider's answer. For a block that was taken before its nodes had started, Parsl
        would report MISSING, which is a failure.
        """
        statuses: dict[str, JobStatus] = BlockProviderExecutor.status(self)
        return statuses

    def _wait_for_blocks(self, timeout_s: float) -> None:
        assert self.provider is not None
        end = time.monotonic() + timeout_s
        jobs = list(self.blocks_to_job_id.values())
        while jobs and time.monotonic() < end:
            if all(status.terminal for status in self.provider.status(jobs)):
                return
            time.sleep(0.1)

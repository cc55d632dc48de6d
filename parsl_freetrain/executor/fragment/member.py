"""One node's share of a fragment: its ranks, and the messages between them and the executor."""

import logging
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import zmq

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.executor.fragment import node_fork_server
from parsl_freetrain.executor.fragment.control_channel import ControlClient
from parsl_freetrain.executor.fragment.member_order import MemberOrder, RankResult
from parsl_freetrain.host.processes import OomWatch
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.fork_client import RankProcess
from parsl_freetrain.training.process.linux import StopWatch
from parsl_freetrain.training.process.node_agent import NOTICES, ignore_notices, listen_for_notices
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.fragment_order import RankPlace

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LOGS, FRAGMENTS = 1000, 10
"""Number of logs of ranks that a trainer keeps, and of fragments that keep theirs in any case."""
_LOG = re.compile(r'(?:fragment|ahead-of)-(\d+)-.+\.log')
_STOPPED_SHARE = 0.5  # of hang_s, until a stopped rank is killed; the rest is for the others


class Member:
    def __init__(self, order: MemberOrder) -> None:
        self._order = order = order.received()
        self._ranks: dict[int, RankProcess] = {}
        self._watches: dict[int, StopWatch] = {}
        self._fork_server: tuple[int, StopWatch] | None = None
        self._results: dict[int, RankResult] = {}
        self._notice = ''
        self._passed_on = ''
        self._payload = b''
        self._kill_at, self._leaves_until = float('inf'), 0.0
        self._oom = OomWatch()
        self._ahead: list[Channel[msg.FromRank]] = []  # of standby ranks that do not wait yet
        self._ahead_started = self._ahead_awaited = False

    def run(self, payload: bytes) -> list[RankResult]:
        """Start the ranks, and pass messages until all have ended. Returns how each ended."""
        order, self._payload = self._order, payload
        key = (order.fragment.trainer, order.fragment.fragment, order.member)
        for number in NOTICES:
            signal.signal(number, self._on_signal)
        end = order.endpoint
        control = ControlClient(end.addresses, end.port, end.cert_dir, key)
        self._notices = listen_for_notices()
        try:
            control.send(msg.Hello(node_fork_server.node_name(), time.time()))
            self._launch(payload, control.address)
            self._relay(control)
        finally:
            for rank in self._ranks.values():
                rank.kill()
                rank.close()
            for channel in self._ahead:
                channel.close()
            control.close()
            if self._notices is not None:
                self._notices.close()
            ignore_notices()
        return [self._results[rank] for rank in sorted(self._results)]

    def _on_signal(self, number: int, _: object) -> None:
        self._notice = signal.Signals(number).name

    def _launch(self, payload: bytes, address: str) -> None:
        order = self._order
        server = node_fork_server.fork_server_of_node(
            order.endpoint.node_log_dir, order.endpoint.template
        )
        server.wait_ready(node_fork_server.FORK_SERVER_READY_S)
        if server.pid is not None:
            self._fork_server = server.pid, StopWatch(server.pid)
            self._oom = OomWatch(server.pid)  # its ranks are in the same cgroup
        Path(order.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        count = order.fragment.per_node
        for local_rank in range(count):
            rank = order.member * count + local_rank
            log = Path(order.log_dir) / f'fragment-{order.fragment.fragment:06d}-rank-{rank}.log'
            world_size, nodes = order.members * count, order.members
            place = RankPlace(rank, world_size, local_rank, nodes, str(log), address)
            self._ranks[rank] = server.launch(order.fragment, place, payload, {})
            self._watches[rank] = StopWatch(self._ranks[rank].pid)
            self._results[rank] = RankResult(rank, node_fork_server.node_name(), str(log))
        if order.member == 0:
            prune_logs(Path(order.log_dir), order.fragment.fragment)

    def _relay(self, control: ControlClient) -> None:
        poller = zmq.Poller()
        poller.register(control.socket, zmq.POLLIN)
        for process in self._ranks.values():
            poller.register(process.fileno(), zmq.POLLIN)
        running = dict(self._ranks)
        beat = time.monotonic()
        while running:
            ready = {handle for handle, _ in poller.poll(200)}
            for rank, process in list(running.items()):
                if process.fileno() in ready and not self._hear(rank, process, control):
                    poller.unregister(process.fileno())
                    del running[rank]
            while (message := control.receive()) is not None:
                self._handle(message, control)
            self._look_for_notice()
            self._pass_notice_on(control)
            self._look_ahead(control)
            if time.monotonic() >= max(self._kill_at, self._leaves_until):
                for process in running.values():
                    process.kill()
            if time.monotonic() - beat >= HEARTBEAT_S:
                beat = time.monotonic()
                control.send(msg.Alive())
                self._oom.beat()
                self._end_stopped(running)
            if not node_fork_server.manager_lives():
                raise RuntimeError('The manager of this node is gone.')

    def _look_for_notice(self) -> None:
        """Record what the scheduler told the node's first process, which may be gone."""
        while self._notices is not None and self._notices.poll():
            try:
                if (notice := self._notices.recv()) is not None:
                    self._notice = notice.signal
            except EOFError:
                self._notices.close()
                self._notices = None

    def _pass_notice_on(self, control: ControlClient) -> None:
        """Pass the scheduler's notice on: ranks save, and nothing more is started here."""
        if self._notice == self._passed_on:
            return
        self._passed_on = self._notice
        logger.info('%s: asking the ranks to stop', self._notice)
        control.send(msg.Notice(self._notice))
        self._tell(msg.StopTraining(self._notice, node_leaves=True))

    def _run_ahead(self, wait_s: float, *, awaited: bool) -> None:
        """Start standby ranks, once. ``awaited``: somebody waits until they wait."""
        self._ahead_awaited |= awaited
        if not self._ahead_started:
            try:
                started = node_fork_server.start_standby(self._order, self._payload, wait_s)
                self._ahead, self._ahead_started = started, True
            except (FreeTrainError, OSError) as error:  # the next fragment starts without them
                logger.info('No ranks run ahead of the next fragment: %s', error)

    def _look_ahead(self, control: ControlClient) -> None:
        """Say once that all standby ranks wait, or that none could be started."""
        for channel in [channel for channel in self._ahead if channel.poll()]:
            channel.close()
            self._ahead.remove(channel)
        if self._ahead_awaited and not self._ahead:
            self._ahead_awaited = False
            control.send(msg.StandbyReady())

    def _tell(self, message: msg.ToRank) -> None:
        for process in self._ranks.values():
            process.send(message)

    def _end_stopped(self, running: dict[int, RankProcess]) -> None:
        """Kill ranks stopped for too long, or a stopped fork server: all others would wait."""
        limit_s = _STOPPED_SHARE * self._order.fragment.hang_s
        if self._fork_server is not None and self._fork_server[1].stopped_s() >= limit_s:
            logger.warning('The fork server of this node was stopped, and is killed.')
            os.kill(self._fork_server[0], signal.SIGKILL)
            self._fork_server = None
        for rank, process in running.items():
            stopped_s = self._watches[rank].stopped_s()
            if stopped_s >= limit_s:
                why = f'was stopped (SIGSTOP or SIGTSTP) for {stopped_s:.0f} s and had to be killed'
                self._results[rank] = replace(self._results[rank], killed=why)
                process.kill()

    def _hear(self, rank: int, process: RankProcess, control: ControlClient) -> bool:
        try:
            message = process.recv()
        except EOFError:
            result = self._results[rank]
            if result.outcome is None and result.status is None:
                # The fork server is gone, and the rank with it.
                control.send(msg.RankEnded(rank, ok=False, died=True))
            return False
        result = self._results[rank]
        match message:
            case msg.Outcome():
                self._results[rank] = result = replace(result, outcome=message)
                control.send(msg.RankEnded(rank, result.ok))
            case msg.Exit(status):
                oom = result.may_lack_memory(status) and self._oom.struck()
                self._results[rank] = replace(result, status=status, out_of_memory=oom)
                if result.outcome is None:
                    control.send(msg.RankEnded(rank, ok=False, died=True))
            case msg.LeavingState():
                self._leaves_until = time.monotonic() + msg.LEAVING_S
            case msg.RankPid() | msg.Waiting() | None:
                pass
            case _:
                control.send(message)
        return True

    def _handle(self, message: msg.ToMember, control: ControlClient) -> None:
        match message:
            case msg.StartStandby(wait_s, rescale):
                self._run_ahead(wait_s, awaited=rescale)
                if rescale:
                    self._tell(msg.NodeStays())
            case msg.TimeLeft(left_s):
                self._tell(msg.NodeEnds(time.monotonic() + left_s))
            case msg.AreYouThere():
                control.send(msg.Alive())
            case msg.Abandon(why, spare_s):
                logger.info('Told to abandon the fragment: %s', why)
                self._kill_at = time.monotonic() + spare_s
                self._leaves_until *= spare_s > 0
            case msg.StopTraining():
                self._tell(message)
            case msg.Rendezvous():
                for rank, process in self._ranks.items():
                    if rank != 0:  # rank 0 has sent it
                        process.send(message)


def prune_logs(folder: Path, fragment: int) -> None:
    """Remove the oldest logs when a fragment has begun: projects have quotas of files."""
    with suppress(OSError):
        named = ((_LOG.fullmatch(log.name), log) for log in folder.iterdir())
        for number, log in sorted((int(match[1]), log) for match, log in named if match)[:-LOGS]:
            if number <= fragment - FRAGMENTS:
                log.unlink(missing_ok=True)

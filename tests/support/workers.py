"""Runs test files in several processes: ``--workers N``, forked from one that has imported and
collected all. A file stays on one worker, for its fixtures; whichever is free takes the next.
"""

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal

import pytest

from parsl_freetrain.training.process.linux import die_with_parent

Unit = Sequence[pytest.Item]


@dataclass
class Worker:
    """As the collecting process sees it: its last test, and those of its file that are not over."""

    pid: int
    messages: Connection
    last: pytest.Item
    left: dict[str, pytest.Item] = field(default_factory=dict)
    ended: bool = False
    status: int | None = None

    def wait(self) -> int:
        """Its exit status, as of ``subprocess``: less than 0 for a signal."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status


def run(
    session: pytest.Session, units: Sequence[Unit], count: int, begin: Callable[[], None]
) -> None:
    """Run the units, in this order, on so many workers, each of which calls ``begin`` first."""
    config = session.config
    terminal = config.pluginmanager.get_plugin('terminalreporter')
    assert terminal is not None
    terminal.showfspath = False  # files run beside each other
    base = getattr(config, '_tmp_path_factory').getbasetemp()  # noqa: B009
    # The numbers of the units, two bytes each: who reads one runs it.
    queue, numbers = os.pipe()
    os.write(numbers, b''.join(number.to_bytes(2) for number in range(len(units))))
    os.close(numbers)
    workers: list[Worker] = []
    try:
        for number in range(min(count, len(units))):
            ours, theirs = Pipe(duplex=False)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                die_with_parent(signal.SIGTERM)
                own = base / f'worker-{number}'
                own.mkdir()
                getattr(config, '_tmp_path_factory')._basetemp = own  # noqa: B009
                begin()
                _work(session, units, queue, theirs)
            theirs.close()
            workers.append(Worker(pid, ours, units[number][0]))
        _follow(session, units, workers, queue)
    except BaseException:
        _take_all(queue)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        raise
    finally:
        for worker in workers:
            worker.wait()
            worker.messages.close()
        os.close(queue)


def _take_all(queue: int) -> None:
    """Leave nothing for the workers to begin."""
    while os.read(queue, 4096):
        pass


def _follow(
    session: pytest.Session, units: Sequence[Unit], workers: Sequence[Worker], queue: int
) -> None:
    """Pass on what the workers say until all have ended."""
    hook = session.config.hook
    following = {worker.messages: worker for worker in workers}
    while following:
        for messages in wait(list(following)):
            assert isinstance(messages, Connection)
            worker = following[messages]
            try:
                kind, said = messages.recv()
            except EOFError:
                del following[messages]
                why = f'the worker ended before the end of this test, status {worker.wait()}'
                for item in worker.left.values():
                    _fail(item, 'call', why)
                if not worker.left and not worker.ended:
                    _fail(worker.last, 'teardown', why)
                continue
            match kind:
                case 'unit':
                    worker.left = {item.nodeid: item for item in units[said]}
                case 'next':
                    worker.left = {}
                case 'report':
                    report = hook.pytest_report_from_serializable(config=session.config, data=said)
                    hook.pytest_runtest_logreport(report=report)
                case 'over':
                    worker.last = worker.left.pop(said[0])
                    hook.pytest_runtest_logfinish(nodeid=said[0], location=said[1])
                case 'warning':
                    _warn(session.config, *said)
                case 'end':
                    worker.ended = True
                    if said:
                        _fail(worker.last, 'teardown', said)
            if session.shouldfail or session.shouldstop:
                _take_all(queue)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _fail(item: pytest.Item, when: Literal['call', 'teardown'], why: str) -> None:
    """What ends a worker at its end is an error of its last test, as without workers."""
    report = pytest.TestReport(item.nodeid, item.location, {}, 'failed', why, when)
    item.config.hook.pytest_runtest_logreport(report=report)


def _warn(
    config: pytest.Config, text: str, category: str, file: str, line: int, *where: Any
) -> None:
    kind = type(category, (Warning,), {})
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={
            'warning_message': warnings.WarningMessage(kind(text), kind, file, line),
            **dict(zip(('when', 'nodeid', 'location'), where, strict=True)),
        }
    )


class _Sender:
    """Sends what happens in a worker to the process that reports it."""

    def __init__(self, config: pytest.Config, messages: Connection) -> None:
        self._config = config
        self._messages = messages

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._messages.send(('report', said))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._messages.send(('over', (nodeid, location)))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        w = warning_message
        name = w.category.__name__
        said = (str(w.message), name, w.filename, w.lineno, when, nodeid, location)
        self._messages.send(('warning', said))


def _work(session: pytest.Session, units: Sequence[Unit], queue: int, messages: Connection) -> None:
    """Run units until there is none left; never returns."""
    manager = session.config.pluginmanager
    manager.unregister(name='terminalreporter')
    manager.register(_Sender(session.config, messages), 'sender')
    capture = manager.get_plugin('capturemanager')
    assert capture is not None
    capture.stop_global_capturing()  # its files are those of all
    capture.start_global_capturing()
    capture.suspend_global_capture()
    try:
        while number := os.read(queue, 2):
            messages.send(('unit', int.from_bytes(number)))
            unit = units[int.from_bytes(number)]
            # What belongs to the session stays for the next file.
            following = [*unit[1:], session]
            for item, after in zip(unit, following, strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if session.shouldfail or session.shouldstop:
                    break
            messages.send(('next', None))
        session._setupstate.teardown_exact(None)
        messages.send(('end', ''))
    except BaseException:
        messages.send(('end', traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

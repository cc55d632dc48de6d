"""One block of the local site: runs a command once per slot, and ends it as a scheduler would. It
is a program of its own, which imports little. It kills its nodes by SIGKILL, without warning: at
the time given, on SIGTERM, or when its owner has died.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from parsl_freetrain.host import files
from parsl_freetrain.host.leftovers import remove_leftovers
from parsl_freetrain.host.processes import start_of

NODE_VARIABLE = 'FREETRAIN_NODE'
# Every process of a block inherits this mark, even one that leaves its process group.
BLOCK_VARIABLE = 'FREETRAIN_BLOCK_JOB'

FINISHED, TAKEN, CANCELLED, ORPHANED = 'finished', 'taken', 'cancelled', 'orphaned'
EXIT_CODES = {TAKEN: 121, ORPHANED: 122, CANCELLED: 128 + signal.SIGTERM}

_POLL_S = 0.5
_KILL_WAIT_S = 5.0


def end_file(folder: str | Path, job_name: str) -> Path:
    """Where a block says how it ended: ``{"how", "at", "exit_codes": {node: code or null}}``."""
    return Path(folder) / f'{job_name}.end.json'


def nodes_file(folder: str | Path, job_name: str) -> Path:
    """Where a block writes the sessions that it has opened: ``{process id: start time}``."""
    return Path(folder) / f'{job_name}.nodes.json'


def kill_block(folder: Path, job_name: str) -> int:
    """SIGKILL a block's processes, and count them: by session, and by the mark they inherit."""
    sessions = _sessions(folder, job_name)
    killed: set[int] = set()
    # Between a look and the kill a process may have started another one.
    give_up = time.monotonic() + _KILL_WAIT_S
    while time.monotonic() < give_up:
        found = [each for each in psutil.process_iter() if _belongs(each, job_name, sessions)]
        if not found:
            break
        for process in found:
            # psutil signals only the process it has looked at, not a later one with its number.
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        time.sleep(0.005)
    return len(killed)


def _sessions(folder: Path, job_name: str) -> set[int]:
    """The sessions of a block's nodes that are still its own."""
    try:
        leaders: dict[str, str] = json.loads(nodes_file(folder, job_name).read_text())
    except (OSError, ValueError):
        return set()
    # A number is not given anew while its session lives: with another leader that is over.
    return {int(pid) for pid, start in leaders.items() if start_of(int(pid)) in ('', start)}


def _belongs(process: psutil.Process, job_name: str, sessions: set[int]) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        here = os.getsid(process.pid) in sessions
        return here or bool(process.environ().get(BLOCK_VARIABLE) == job_name)
    except (psutil.Error, OSError):
        return False


def _write(path: Path, document: object) -> None:
    files.replace(path, json.dumps(document).encode(), durable=False)


class SlotBlock:
    """``end``: when it is taken (``time.time()``); ``owner``: its process id and start;
    ``variables``: of the environment, by node.
    """

    def __init__(
        self,
        folder: str,
        job_name: str,
        end: float | None,
        owner: tuple[int, str],
        variables: Mapping[str, Mapping[str, str]],
        nodes: Sequence[str],
    ) -> None:
        self._folder, self._job_name, self._names = Path(folder), job_name, nodes
        self._end, self._owner, self._variables = end, owner, variables
        self._nodes: dict[int, str] = {}
        self._exit_codes: dict[str, int | None] = {}
        self._cancelled = False
        self._wake_read, self._wake_write = os.pipe()

    def run(self, command: str) -> int:
        """Run ``command`` on every node until the block ends; returns this process's status."""
        self._listen()
        try:
            for node in self._names:
                # A signal that came while nodes were starting is not left waiting for all of them.
                if self._cancelled:
                    break
                self._start(node, command)
            # It only helps to tidy up after this process was killed; a block runs on a full disk.
            with contextlib.suppress(OSError):
                leaders = {pid: start_of(pid) for pid in self._nodes}
                _write(nodes_file(self._folder, self._job_name), leaders)
            how = self._watch()
        finally:
            self._kill_all()
        # A full disk or a folder that is gone must not keep the block from ending.
        with contextlib.suppress(OSError):
            said = {'how': how, 'at': time.time(), 'exit_codes': self._exit_codes}
            _write(end_file(self._folder, self._job_name), said)
        codes = [code for code in self._exit_codes.values() if code]
        return EXIT_CODES.get(how, min(255, abs(codes[0])) if codes else 0)

    def _listen(self) -> None:
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._cancel)
        # Ctrl-C reaches every process of the terminal at once, but training must stop in order; and
        # a terminal that closes ends the owner, whose end is watched anyway. Not SIG_IGN, which the
        # nodes would inherit.
        for ignored in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, lambda *_: None)

    def _cancel(self, *_: object) -> None:
        self._cancelled = True

    def _start(self, node: str, command: str) -> None:
        # Parsl's processes rename themselves; SPT_NOENV has setproctitle spare the mark.
        # Parsl starts its worker pool by name, also where the virtual environment is not activated.
        path = f'{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get("PATH", os.defpath)}'
        environment = os.environ | {
            NODE_VARIABLE: node,
            BLOCK_VARIABLE: self._job_name,
            'SPT_NOENV': '1',
            'PATH': path,
            **self._variables.get(node, {}),
        }
        log = f'{self._folder / self._job_name}.{node}'
        with (
            os.fdopen(files.open_log(f'{log}.out'), 'wb') as out,
            os.fdopen(files.open_log(f'{log}.err'), 'wb') as err,
        ):
            process = subprocess.Popen(
                ['/bin/bash', '-c', command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._nodes[process.pid] = node
        self._exit_codes[node] = None
        # It is reaped below, together with all others.
        process.returncode = 0

    def _watch(self) -> str:
        while True:
            self._reap()
            if self._cancelled:
                return CANCELLED
            if not self._nodes:
                return FINISHED
            left_s = _POLL_S if self._end is None else self._end - time.time()
            if left_s <= 0:
                return TAKEN
            if start_of(self._owner[0]) != self._owner[1] or not self._owner[1]:
                return ORPHANED
            if select.select([self._wake_read], [], [], min(left_s, _POLL_S))[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)

    def _reap(self) -> None:
        while self._nodes:
            over = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if over is None:
                return
            # As long as it is not reaped, no other group can have its number.
            _kill_group(over.si_pid)
            status = os.waitpid(over.si_pid, 0)[1]
            self._exit_codes[self._nodes.pop(over.si_pid)] = os.waitstatus_to_exitcode(status)

    def _kill_all(self) -> None:
        for pid in self._nodes:
            _kill_group(pid)
        for pid, node in self._nodes.items():
            self._exit_codes[node] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._nodes.clear()
        kill_block(self._folder, self._job_name)
        remove_leftovers()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == '__main__':
    os.umask(0o077)
    sys.exit(SlotBlock(*json.loads(sys.argv[1])).run(sys.argv[2]))

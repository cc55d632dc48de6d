"""A scheduler's commands, one at a time, each with a time limit; nothing passes through a shell."""

import os
import pwd
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.sites.batch.shared_answers import answer

T = TypeVar('T')

# What submitting commands say where the answer was lost, and perhaps not the job.
_UNREACHED = re.compile(
    '(unable|failed) to con|connect to|not connected|connection re|errno=150|timed out|zero bytes|'
    'unexpected message|temporarily unable|premature end|communication failure|end of file',
    re.I,
)


class SchedulerSilent(FreeTrainError, RuntimeError):
    """The scheduler did not answer, or its command failed: nothing can be concluded from that."""


class SchedulerRefused(FreeTrainError, RuntimeError):
    """The scheduler answered, and the answer is no."""


class Commands:
    """Runs the commands of one scheduler, for ``timeout_s`` seconds at most each; ``environment``:
    more variables; ``meddling``: prefixes of those that would change what is asked, or submitted.
    """

    def __init__(
        self,
        scheduler: str,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        meddling: tuple[str, ...] = (),
    ) -> None:
        self._scheduler, self._timeout_s = scheduler, timeout_s
        self._environment = {**(environment or {}), 'LC_ALL': 'C'}
        self._meddling = meddling
        self._lock = threading.Lock()
        self.commands: Counter[str] = Counter()

    def ask(
        self, command: Sequence[str], accepted: Collection[int] = (0,), **environment: str
    ) -> str:
        """Run a command, or take its answer to another run of this user; its output. Raises
        SchedulerSilent or BadInput. ``accepted``: exit statuses that are no failure.
        """

        def run() -> str:
            done = self.run(command, None, environment)
            if done.returncode not in accepted:
                what, said = ' '.join(command[:3]), in_one_line(done.stderr)
                raise SchedulerSilent(f'{what} failed with status {done.returncode}: {said}')
            return done.stdout

        if accepted != (0,):  # a question of this run's own jobs
            return run()
        begins = 'PATH', self._scheduler.upper()
        which = {name: value for name, value in os.environ.items() if name.startswith(begins)}
        return answer(command, which, run, self._timeout_s)

    def run(
        self,
        command: Sequence[str],
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; SchedulerSilent after too long, BadInput if missing."""
        with self._lock:
            self.commands[command[0]] += 1
        kept = {n: value for n, value in os.environ.items() if not n.startswith(self._meddling)}
        try:
            process = subprocess.Popen(
                command,
                env={**kept, **self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors='replace',
                cwd=folder,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise BadInput(
                f'There is no {self._scheduler} here: the command {command[0]} is not on the PATH; '
                'run this on a login node of the machine, perhaps after loading a module.'
            ) from None
        except OSError as error:  # such as too many processes of this user
            raise SchedulerSilent(f'{command[0]} could not be started: {error.strerror}') from error
        with process:  # closes its pipes, which a process that it has started may keep open
            try:
                said = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # a site's script with what it runs
                what = f'{command[0]} did not answer within {self._timeout_s:g} s'
                raise SchedulerSilent(what) from None
        return subprocess.CompletedProcess(command, process.returncode, *said)

    def submit(self, command: Sequence[str], job_id: str) -> str:
        """Submit the script in the last word; returns the job id. SchedulerRefused has the
        scheduler's words; SchedulerSilent: the job may have been submitted. ``job_id``: of the line
        that has the id, as sites wrap these commands.
        """
        done = self.run(command)
        if done.returncode or not done.stdout.strip():
            raise self.refused(done, f'{command[0]} refused the script {command[-1]}: ')
        for line in reversed(done.stdout.splitlines()):
            if found := re.fullmatch(job_id, line.strip()):
                return found[1]
        raise SchedulerSilent(
            f'{command[0]} gave no job id for the script {command[-1]}, but said '
            f'{in_one_line(done.stdout, command[0])[:200]!r}'
        )

    def refused(self, done: subprocess.CompletedProcess[str], what: str = '') -> FreeTrainError:
        """Why a submitting command failed: SchedulerRefused, or SchedulerSilent."""
        said = in_one_line(done.stderr, done.args[0])
        if _UNREACHED.search(said):
            return SchedulerSilent(f'{done.args[0]} did not reach {self._scheduler}: {said}')
        return SchedulerRefused(f'{what}{said or "it gave no job id"}')

    def cancel(self, command: Sequence[str], over: Collection[str] = ()) -> None:
        """End jobs; SchedulerSilent: some may run. ``over``: its words for an ended one."""
        done = self.run(command)
        lines = [line.lower() for line in done.stderr.splitlines() if line.strip()]
        harmless = lines and all(any(words in line for words in over) for line in lines)
        if done.returncode and not harmless:
            said = in_one_line(done.stderr, command[0])
            raise SchedulerSilent(
                f'{" ".join(command)} failed with status {done.returncode}: {said}'
            )

    def shrink(
        self, command: Sequence[str], job_id: str, leave: Sequence[str], folder: str | None = None
    ) -> None:
        """Run a command that takes nodes from a job. Raises as :meth:`submit`."""
        done = self.run(command, folder)
        if done.returncode:
            what = f'{self._scheduler} does not take {", ".join(leave)} from job {job_id}: '
            raise self.refused(done, what)


def offered(label: str, kind: str, name: str, there: Mapping[str, T]) -> T:
    if name not in there:
        has = ', '.join(sorted(there)) or 'none that you may see'
        raise BadInput(f'{label} has no {kind} {name!r}; it has {has}.')
    return there[name]


def own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def in_one_line(stderr: str, command: str = '') -> str:
    """The lines of standard error, joined, each without the command's name at its beginning."""
    lines = (line.strip().removeprefix(f'{command}: ') for line in stderr.splitlines())
    return '; '.join(line.removeprefix('error: ') for line in lines if line)[:1000]

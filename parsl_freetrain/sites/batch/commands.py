"""A scheduler's commands, run one at a time, each with a time limit; nothing passes through a shell."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from parsl_freetrain.core.errors import BadInput, FreeTrainError


class SchedulerSilent(FreeTrainError, RuntimeError):
    """The scheduler did not answer, or not as it should: nothing is known, and nothing follows from that."""


class Refused(FreeTrainError, RuntimeError):
    """The scheduler answered, and the answer is no."""


class Commands:
    """Runs the commands of one scheduler.

    Parameters
    ----------
    scheduler
        Its name, for sentences.
    timeout_s
        A command that takes longer, in seconds, has not answered.
    environment
        Variables that commands get beside those of this process.
    meddling
        Beginnings of variables that commands do not get, because they would change what is asked, answered or submitted.

    Attributes
    ----------
    commands
        How often each command was run, by its name.
    """

    def __init__(self, scheduler: str, timeout_s: float, environment: Mapping[str, str] | None = None,
                 meddling: tuple[str, ...] = ()) -> None:
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._environment = {**(environment or {}), 'LC_ALL': 'C'}
        self._meddling = meddling
        self._lock = threading.Lock()
        self.commands: Counter[str] = Counter()

    def ask(self, command: Sequence[str], accepted: Collection[int] = (0,)) -> str:
        """What a command says on standard output.

        Parameters
        ----------
        accepted
            Statuses with which it may end.

        Raises
        ------
        SchedulerSilent
            It took too long or failed.
        BadInput
            There is no such command.
        """
        done = self.run(command)
        if done.returncode not in accepted:
            raise SchedulerSilent(f'{" ".join(command[:3])} failed with status {done.returncode}: {in_one_line(done.stderr)}')
        return done.stdout

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """The command, ended, whatever its status.

        Raises
        ------
        SchedulerSilent
            It took too long.
        BadInput
            There is no such command.
        """
        with self._lock:
            self.commands[command[0]] += 1
        kept = {name: value for name, value in os.environ.items() if not name.startswith(self._meddling)}
        try:
            return subprocess.run(command, env={**kept, **self._environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  errors='replace', timeout=self._timeout_s, check=False)
        except FileNotFoundError:
            raise BadInput(f'There is no {self._scheduler} here: the command {command[0]} is not on the PATH; run this on a login node of '
                           f'the machine, perhaps after loading a module.') from None
        except subprocess.TimeoutExpired:
            raise SchedulerSilent(f'{command[0]} did not answer within {self._timeout_s:g} s') from None


def in_one_line(stderr: str) -> str:
    """What a command complains about."""
    return '; '.join(line.strip() for line in stderr.splitlines() if line.strip())[:1000]

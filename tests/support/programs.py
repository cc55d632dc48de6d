"""Programs that tests run."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
FREETRAIN = (sys.executable, '-m', 'parsl_freetrain.cli.main')


class Program(subprocess.Popen[str]):
    """A program that runs, with pipes to and from it and the modules of this repository."""

    stdin: IO[str]
    stdout: IO[str]
    stderr: IO[str]

    def __init__(
        self, words: Sequence[object], *, more_env: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        env = {**os.environ, 'PYTHONPATH': str(ROOT), **(more_env or {})}
        pipe = subprocess.PIPE
        more = {'stdin': pipe, 'stdout': pipe, 'env': env, **more}
        super().__init__([str(word) for word in words], text=True, **more)

    def said(self) -> str:
        """The next line of its output."""
        return self.stdout.readline().strip()


def run_to_end(
    words: Sequence[object], *, more_env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its output as text."""
    if more_env is not None:
        more['env'] = {**os.environ, **more_env}
    if 'input' not in more:
        more['stdin'] = subprocess.DEVNULL
    more = {'check': False, 'timeout': LIMIT_S, **more}
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, **more)

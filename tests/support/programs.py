"""Programs that tests run."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

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


def programs(folder: Path, patch: pytest.MonkeyPatch | None = None, **texts: str) -> Path:
    """A program of each name, in front of all others for the rest of a test if it is patched."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text if text.startswith('#!') else f'#!/bin/bash\n{text}\n')
        (folder / name).chmod(0o700)
    if patch is not None:
        patch.setenv('PATH', str(folder), prepend=':')
    return folder


def run_script(folder: Path, script: str, variable: str, **texts: str) -> str:
    """Run a batch script with these programs; what they have written to the file $SAID."""
    fakes, said = programs(folder / 'bin', None, **texts), folder / 'said'
    (folder / 'script').write_text(script)
    env = {'PATH': f'{fakes}:/usr/bin:/bin', variable: '1', 'SAID': str(said)}
    words = ['/bin/bash', str(folder / 'script')]
    subprocess.run(words, check=False, timeout=LIMIT_S, env=env)
    return said.read_text()

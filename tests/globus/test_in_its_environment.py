"""Runs the tests in ``endpoint/`` in an environment with Globus Compute."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT = Path(__file__).parent / 'endpoint'

# The limit of a test holds for each test in there, of which there are many.
pytestmark = pytest.mark.timeout(0)


def test_globus_compute(globus_python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            globus_python,
            '-m',
            'pytest',
            '-q',
            '-o',
            f'cache_dir={tmp_path / "cache"}',
            f'--basetemp={tmp_path / "inner"}',
            str(ENDPOINT),
        ],
        cwd=ROOT,
        env={**os.environ, 'PATH': f'{globus_python.parent}:{os.environ["PATH"]}'},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]

"""Runs the tests in ``endpoint/`` in an environment with Globus Compute."""

import os
from pathlib import Path

import pytest

from tests.support.programs import run_to_end

ROOT = Path(__file__).resolve().parents[2]
ENDPOINT = Path(__file__).parent / 'endpoint'

# The limit of a test holds for each test in there, of which there are many.
pytestmark = [pytest.mark.long, pytest.mark.timeout(0)]


def test_globus_compute(globus_python: Path, tmp_path: Path) -> None:
    done = run_to_end(
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
        timeout=None,
        more_env={'PATH': f'{globus_python.parent}:{os.environ["PATH"]}'},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]

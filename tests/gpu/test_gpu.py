"""The runs on an accelerator (``make gpu``) do not rot: those with a meaning on a CPU run there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.training.comm.devices import count_visible
from tests.gpu import run
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
QUICK = ('throughput', '1 shard', 'same bits', 'kill', 'two ranks')


def cases(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and what was found."""
    done = subprocess.run(
        [sys.executable, '-m', 'tests.gpu.run', '--out', str(out), *options],
        cwd=ROOT,
        timeout=2 * LIMIT_S,
        check=False,
    )
    return done.returncode, json.loads((out / 'gpu.json').read_text())['cases']


@pytest.mark.long
def test_every_case_with_a_meaning_on_a_cpu_runs_there(tmp_path: Path) -> None:
    how = ('--device', 'cpu', '--seconds', '0.1', '--minutes', '60')
    status, found = cases(tmp_path, *how, '--cases', *QUICK)
    assert status == 0, found
    assert {'gpt throughput', 'resnet 1 shard', 'same bits'} < found.keys()
    assert found['gpt 1 shard']['rate'] > 0
    table = (tmp_path / 'gpu.md').read_text()
    assert all(f'| {name} |' in table for name in found)


@pytest.mark.gpu
@pytest.mark.skipif(not count_visible(), reason='torch finds no accelerator on this computer')
def test_every_case_runs_on_an_accelerator(tmp_path: Path) -> None:
    status, found = cases(Path(os.environ.get('OUT', tmp_path)), '--minutes', '8')
    assert status == 0, found


def test_a_failed_case_is_told_and_the_others_run_on(tmp_path: Path) -> None:
    def fails(machine: run.Machine) -> run.Figures:
        raise AssertionError('two results differ')

    machine = run.Machine(tmp_path, None, 0, 0.1)  # type: ignore[arg-type]
    found = run.run({'bad': fails, 'good': lambda machine: {'rate': 1.0}}, machine, tmp_path)
    assert 'two results differ' in found['bad']['failed']
    assert found['good']['rate'] == 1
    table = (tmp_path / 'gpu.md').read_text()
    assert '| bad | FAILED: AssertionError: two results differ |' in table

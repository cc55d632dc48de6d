"""A submitting process that is killed, and the next one that goes on with its blocks."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parsl_freetrain import LocalSite, Reproducible, freetrain_app, same_weights
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal
from tests.support.programs import Program
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slurm

EPOCHS = 60


@contextmanager
def submitting(folder: Path, pause_s: float) -> Iterator[subprocess.Popen[str]]:
    with (
        (folder / 'said').open('a') as said,
        Program(
            [sys.executable, '-m', 'tests.slurm.submitting', folder, str(EPOCHS), str(pause_s)],
            stdin=subprocess.DEVNULL,
            stderr=said,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def blocks(slurm: Cluster) -> dict[str, str]:
    """Start time and state of each block's job that the cluster remembers, by id."""
    lines = slurm.run(
        'squeue', '--noheader', '--all', '--states=all', '--format=%A|%S|%T|%j'
    ).splitlines()
    return {
        job: f'{start} {state}'
        for job, start, state, name in (line.split('|') for line in lines)
        if name.startswith('freetrain.')
    }


def samples(folder: Path, least_runs: int) -> int:
    """Samples of the newest checkpoint, after this number of runs has trained."""
    try:
        with Journal(folder / 'checkpoints' / 'ledger.journal') as ledger:
            history = ledger.history()
    except BadInput:  # there is none yet, or nothing is in it yet
        return 0
    trained = [run.checkpoints for run in history.runs if run.checkpoints]
    return max(c.samples for own in trained for c in own) if len(trained) >= least_runs else 0


def wait(process: subprocess.Popen[str], folder: Path, least_runs: int, more_than: int = 0) -> int:
    end = time.monotonic() + LIMIT_S
    while (now := samples(folder, least_runs)) <= more_than:
        assert process.poll() is None, (folder / 'said').read_text()
        assert time.monotonic() < end, (folder / 'said').read_text()
        time.sleep(0.1)
    return now


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_next_run_goes_on_with_blocks_of_a_killed_one(slurm: Cluster, tmp_path: Path) -> None:
    before = set(blocks(slurm))

    def ours() -> dict[str, str]:
        return {job: said for job, said in blocks(slurm).items() if job not in before}

    with submitting(tmp_path, 0.1) as first:
        reached = wait(first, tmp_path, 1)
        held = ours()
        assert held
        assert all(said.endswith('RUNNING') for said in held.values())
        first.send_signal(signal.SIGKILL)
        first.wait()
    begun = time.monotonic()
    with submitting(tmp_path, 0.0) as second:
        wait(second, tmp_path, 2, reached)
        print(f'trains again {time.monotonic() - begun:.1f} s after the second run was started')
        assert ours() == held, 'the same jobs, never ended in between, and no other ones'
        said = second.communicate(timeout=LIMIT_S)[0].splitlines()
    assert second.returncode == 0, (tmp_path / 'said').read_text()
    assert ours().keys() == held.keys(), 'nothing was submitted again'
    end = json.loads(said[-1])
    assert end['samples'] == EPOCHS * 96
    slurm.wait(lambda: not slurm.run('squeue', '--noheader', '--all'))
    with freetrain(tmp_path / 'alone', LocalSite(nodes=1, poll_s=0.2)):
        alone = freetrain_app(max_nodes=1, total_epochs=EPOCHS, mode=Reproducible(shards=2))(
            fit
        )().result(LIMIT_S)
    assert same_weights(end['path'], alone)

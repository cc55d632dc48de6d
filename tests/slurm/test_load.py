"""What the scheduler is asked to do: every command counted, those of blocks included."""

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, SlurmSite, freetrain_app
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain

pytestmark = pytest.mark.slurm

WATCHED_S = 30.0
QUESTIONS = 'squeue', 'sinfo', 'scontrol', 'sacct'
COMMANDS = ('squeue', 'sinfo', 'scontrol', 'sbatch', 'scancel', 'sacct')


class Counted:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / 'log'
        self._log.touch()
        for name in COMMANDS:
            program = folder / name
            program.write_text(
                f'#!/bin/sh\necho {name} >> {self._log}\nexec {shutil.which(name)} "$@"\n'
            )
            program.chmod(0o700)

    def all(self) -> Counter[str]:
        return Counter(self._log.read_text().split())

    def over(self, seconds: float) -> Counter[str]:
        before = self.all()
        time.sleep(seconds)
        return self.all() - before


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_scheduler_is_asked_six_questions_a_minute_and_twenty_while_somebody_could_use_nodes(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(tmp_path / 'bin')
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'), prepend=':')
    site = SlurmSite(partition='batch', interface='lo', longest_s=1200, start_s=3.0)
    with freetrain(tmp_path, site, idle_block_s=2.0):
        assert not counted.over(5.0), 'nobody wants nodes'
        trainer = freetrain_app(
            max_nodes=1, total_epochs=1e6, checkpoints=Checkpoints(every_s=2.0)
        )(fit)
        slurm.submit('--nodes=1', '--time=20')
        futures = [trainer(pause_s=0.5, trainer_name=f'trainer-{number}') for number in range(6)]
        slurm.wait(lambda: slurm.idle_nodes() == 0)
        slurm.wait(lambda: sum(f.running() for f in futures) == 3)
        # Six trainers on three nodes: three go on looking for holes.
        quiet = counted.over(WATCHED_S)
        print(f'in {WATCHED_S:g} s: {dict(quiet)}')
        assert 0 < sum(quiet[name] for name in QUESTIONS) <= 3 + 1, 'one more at an edge'
        # Nobody can use the nodes if his are excluded; somebody could when another job ends.
        mine = slurm.run('squeue', '-h', '-t', 'R', '-o', '%N', '-n', 'wrap').strip()
        slurm.submit('--nodes=1', f'--nodelist={mine}', '--time=20')
        quiet = counted.over(WATCHED_S)
        print(f'with a job that waits for another node: {dict(quiet)}')
        assert sum(quiet[name] for name in QUESTIONS) <= 3 + 2, 'reservations once'
        slurm.submit('--nodes=4', '--time=20')
        busy = counted.over(WATCHED_S)
        print(f'with one that could get these: {dict(busy)}')
        assert sum(busy[name] for name in QUESTIONS) <= 10 + 1
        assert not (quiet + busy).keys() & {'sbatch', 'scancel', 'sacct'}
        for future in futures:
            future.cancel()
        slurm.wait(lambda: slurm.idle_nodes() == 3)
    total = counted.all()
    print(f'in all: {dict(total)}')
    # One before the first, to ask whether blocks would be accepted, and ours.
    assert total['sbatch'] <= 1 + 3 + 3
    assert total['scancel'] <= 3

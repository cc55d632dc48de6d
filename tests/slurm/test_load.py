"""What the scheduler is asked to do: every command counted, by programs in front of Slurm's own,
those of blocks included.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, freetrain_app
from tests.sites.slurm.conftest import slurm_site
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain

pytestmark = pytest.mark.slurm

POLL_S = 1.0
WATCHED_S = 15.0
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
def test_the_scheduler_is_asked_a_few_things_per_interval_whatever_happens(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(tmp_path / 'bin')
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'), prepend=':')
    looks = WATCHED_S / POLL_S + 2
    with freetrain(
        tmp_path, slurm_site(poll_s=POLL_S, interface='lo', longest_s=600), idle_block_s=2.0
    ) as executor:
        assert executor.provider is not None
        without_trainers = counted.over(3 * POLL_S)
        assert not without_trainers, 'nobody wants nodes'
        trainer = freetrain_app(
            max_nodes=1, total_epochs=1e6, checkpoints=Checkpoints(every_s=2.0)
        )(fit)
        futures = [trainer(pause_s=0.05, trainer_name=f'trainer-{number}') for number in range(6)]
        slurm.wait(lambda: slurm.idle_nodes() == 0)
        # Six trainers on four nodes: two go on looking for holes.
        busy = counted.over(WATCHED_S)
        print(f'in {WATCHED_S:g} s, with a poll_s of {POLL_S:g} s: {dict(busy)}')
        assert 0 < busy['squeue'] <= looks + 4  # and each block asks once for its own end
        assert busy['sinfo'] <= looks
        assert busy['scontrol'] <= 1
        assert busy['sbatch'] <= 4
        assert not busy.keys() & {'scancel', 'sacct'}
        for future in futures:
            future.cancel()
        slurm.wait(lambda: slurm.idle_nodes() == 4)
    total = counted.all()
    print(f'in all: {dict(total)}')
    assert total['sbatch'] <= 1 + 4  # one before the first, to ask whether blocks would be accepted
    assert total['scancel'] <= 4

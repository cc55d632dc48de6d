"""What submitting commands print besides the id of the job."""

import os
from pathlib import Path

import pytest

from parsl_freetrain.sites.batch.scheduler import Scheduler
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerRefused, SchedulerSilent
from parsl_freetrain.sites.cobalt import Cobalt, CobaltOptions
from parsl_freetrain.sites.pbspro.options import PbsOptions
from parsl_freetrain.sites.pbspro.scheduler import Pbs
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.scheduler import Slurm

SLURM = Slurm(SlurmOptions(partition='p'))
PBS = Pbs(PbsOptions(queue='q'))
COBALT = Cobalt(CobaltOptions(queue='q'))
BANNER = '--- Welcome to the 2 partitions\n--> Verifying job request... OK\n'


@pytest.mark.parametrize(
    ('scheduler', 'command', 'said', 'job_id'),
    [
        (SLURM, 'sbatch', '17;cluster', '17'),
        (SLURM, 'sbatch', f'{BANNER}17', '17'),
        (SLURM, 'sbatch', f'17\n{BANNER}', '17'),
        (SLURM, 'sbatch', BANNER, None),
        (PBS, 'qsub', '17.server-1.domain', '17.server-1.domain'),
        (PBS, 'qsub', f'{BANNER}17.server\n{BANNER}', '17.server'),
        (PBS, 'qsub', BANNER, None),
        (COBALT, 'qsub', f'{BANNER}17', '17'),
        (COBALT, 'qsub', BANNER, None),
    ],
)
def test_a_job_id_is_found_among_what_a_site_prints_besides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: Scheduler,
    command: str,
    said: str,
    job_id: str | None,
) -> None:
    """A block with a wrong id would be followed by nobody: its nodes would never be given back."""
    fake = tmp_path / command
    fake.write_text(f"#!/bin/sh\ncat <<'end'\n{said}\nend\n")
    fake.chmod(0o700)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    script = tmp_path / 'block.sh'
    if job_id is not None:
        assert scheduler.submit(script) == job_id
        return
    # The job may be there; those without an answer are found by their name, and cancelled.
    with pytest.raises(SchedulerSilent, match=rf'gave no job id for the script {script}, but said'):
        scheduler.submit(script)


def test_a_command_without_output_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'sbatch').symlink_to('/bin/true')
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    with pytest.raises(SchedulerRefused, match='it gave no job id'):
        SLURM.submit(tmp_path / 'block.sh')

"""What submitting commands print besides the id of the job."""

import re
import time
from pathlib import Path

import pytest

from parsl_freetrain.sites.batch import scheduler_commands as commands
from parsl_freetrain.sites.batch.scheduler import Scheduler
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerRefused, SchedulerSilent
from parsl_freetrain.sites.cobalt import Cobalt, CobaltOptions
from parsl_freetrain.sites.pbspro.options import PbsOptions
from parsl_freetrain.sites.pbspro.scheduler import Pbs
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.scheduler import Slurm
from tests.support.programs import programs

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
    programs(tmp_path, monkeypatch, **{command: f"cat <<'end'\n{said}\nend\n"})
    script = tmp_path / 'block.sh'
    if job_id is not None:
        assert scheduler.submit(script) == job_id
        return
    # The job may be there; those without an answer are found by their name, and cancelled.
    with pytest.raises(SchedulerSilent, match=rf'gave no job id for the script {script}, but said'):
        scheduler.submit(script)


FAILED = 'sbatch: error: Batch job submission failed:'
LOST = (
    f'{FAILED} Socket timed out on send/recv operation',
    f'{FAILED} Unable to contact slurm controller (connect failure)',
    'qsub: cannot connect to server pbs (errno=15010)',
)
REFUSED = f'{FAILED} Invalid qos specification', 'qsub: Rejected by hook: contact help@site'


@pytest.mark.parametrize('said', [*LOST, *REFUSED])
def test_a_submission_whose_answer_was_lost_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """The job may be there: it is looked for by its name, and cancelled."""
    name, error = said.partition(':')[0], SchedulerSilent if said in LOST else SchedulerRefused
    scheduler: Scheduler = SLURM if name == 'sbatch' else PBS
    programs(tmp_path, monkeypatch, **{name: f"echo '{said}' >&2\nexit 1\n"})
    with pytest.raises(error, match=re.escape(said[-9:])):
        scheduler.submit(tmp_path / 'block.sh')
    programs(tmp_path, monkeypatch, **{name: f"echo '{said}' >&2\necho 17\n"})
    assert scheduler.submit(tmp_path / 'block.sh') == '17'


def test_commands_that_hang_or_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a site's script runs has its standard output, too, and would be waited for."""
    client, begun = commands.Commands('Slurm', 0.5), time.monotonic()
    programs(tmp_path, monkeypatch, squeue='sleep 300\nexit 0\n')
    with pytest.raises(SchedulerSilent, match=r'squeue did not answer within 0\.5 s'):
        client.ask(['squeue'])
    assert time.monotonic() - begun < 60
    programs(tmp_path, bcancel='').joinpath('bcancel').write_text('\x7fno program')
    with pytest.raises(SchedulerSilent, match='bcancel could not be started: Exec format error'):
        client.cancel(['bcancel', '1'])


def test_no_variable_of_a_job_around_us_reaches_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SLURM_EXPORT_ENV=NONE, which blocks would inherit, their srun finds no program."""
    users = 'SINFO_FUTURE SCONTROL_SIB SQUEUE_FORMAT2 SLURM_MEM_PER_CPU SLURM_EXPORT_ENV '
    users += 'SRUN_CPUS_PER_TASK SLURM_JOB_ID'
    for name in (*users.split(), 'SLURM_CONF', 'SLURM_BITSTR_LEN'):
        monkeypatch.setenv(name, 'odd')
    programs(tmp_path, monkeypatch, sbatch='env\n')
    said = Slurm(SlurmOptions(partition='p')).client.run(['sbatch']).stdout
    there = dict(line.partition('=')[::2] for line in said.splitlines())
    assert not there.keys() & {*users.split()} and there['SLURM_CONF'] == 'odd'
    assert (there['SLURM_BITSTR_LEN'], there['SQUEUE_LOCAL'], there['SINFO_LOCAL']) == tuple('011')

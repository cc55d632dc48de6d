"""Slurm's commands that change something: submissions and cancellations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from parsl_freetrain.sites.batch.commands import Commands, Refused, SchedulerSilent, in_one_line

# The site config says all that variables of these names would; an account may be set for the whole of a user's life.
_MEDDLING = ('SQUEUE_', 'SINFO_', 'SBATCH_', 'SCANCEL_', 'SACCT_')
_KEPT = ('SBATCH_ACCOUNT',)


class SlurmClient(Commands):
    """Runs Slurm's commands.

    Parameters
    ----------
    timeout_s
        A command that takes longer, in seconds, has not answered.
    """

    def __init__(self, timeout_s: float) -> None:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        super().__init__('Slurm', timeout_s, {**kept, 'SLURM_TIME_FORMAT': '%s'}, _MEDDLING)

    def submit(self, script: Path) -> str:
        """Submit a batch script; the job's id.

        Raises
        ------
        Refused
            sbatch said no.
        SchedulerSilent
            It took too long: the job may have been submitted all the same.
        """
        done = self.run(('sbatch', '--parsable', str(script)))
        job_id = done.stdout.strip().split(';')[0]
        if done.returncode or not job_id:
            raise Refused(f'sbatch refused the script {script}: {_words(done.stderr) or "it gave no job id"}')
        return job_id

    def test(self, script: Path) -> None:
        """Ask whether a script would be accepted; submits nothing.

        Raises
        ------
        Refused
            It would not; the message has sbatch's own words.
        SchedulerSilent
            It took too long.
        """
        done = self.run(('sbatch', '--test-only', str(script)))
        if done.returncode:
            raise Refused(_words(done.stderr))

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs; those that are over already are no error.

        Raises
        ------
        SchedulerSilent
            It failed: the jobs may still run.
        """
        done = self.run(('scancel', '--quiet', *job_ids))
        if done.returncode:
            raise SchedulerSilent(f'scancel of {", ".join(job_ids)} failed with status {done.returncode}: {_words(done.stderr)}')


def _words(stderr: str) -> str:
    """What a command complains about, in one line."""
    return '; '.join(line.removeprefix('sbatch: ').removeprefix('error: ') for line in in_one_line(stderr).split('; ') if line)

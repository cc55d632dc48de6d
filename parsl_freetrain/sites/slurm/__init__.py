"""Slurm: holes between other people's jobs, and blocks that fit them."""

from __future__ import annotations

from collections.abc import Callable

from parsl_freetrain.sites.batch.scheduler import Scheduler
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.registry import SiteType
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.scheduler import Slurm

__all__ = ['SITE_TYPE', 'SlurmOptions', 'SlurmSite']


class SlurmSite(BatchSite):
    """One partition of a machine with Slurm.

    The parameters are those of :class:`~parsl_freetrain.sites.batch.site.BatchSite`, the settings
    those of :class:`~parsl_freetrain.sites.slurm.options.SlurmOptions`.
    """

    name = 'slurm'
    job_variable = 'SLURM_JOB_ID'
    options_type = SlurmOptions
    options: SlurmOptions

    def scheduler(self, clock: Callable[[], float]) -> Scheduler:
        return Slurm(self.options)


SITE_TYPE = SiteType(
    'slurm',
    'Slurm',
    SlurmSite,
    SlurmOptions,
    programs=('sinfo', 'squeue', 'sbatch', 'scancel', 'scontrol'),
    version=('sinfo', '--version'),
)

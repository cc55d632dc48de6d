"""One partition of a machine with Slurm as a site."""

from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.registry import SiteType
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.scheduler import Slurm


class SlurmSite(BatchSite):
    """One partition of a machine with Slurm; see :class:`.options.SlurmOptions`."""

    name, job_variable = 'slurm', 'SLURM_JOB_ID'
    options_type, scheduler_type = SlurmOptions, Slurm
    options: SlurmOptions


PROGRAMS = 'sinfo', 'squeue', 'sbatch', 'scancel', 'scontrol'
SITE_TYPE = SiteType('slurm', 'Slurm', SlurmSite, SlurmOptions, PROGRAMS, ('sinfo', '--version'))

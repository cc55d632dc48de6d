"""PBS Pro and OpenPBS: holes between other people's jobs, and blocks that shrink to fit them."""

from __future__ import annotations

from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.pbspro.options import PALS, PbsOptions
from parsl_freetrain.sites.pbspro.scheduler import Pbs
from parsl_freetrain.sites.registry import SiteType

__all__ = ['PALS', 'SITE_TYPE', 'PbsOptions', 'PbsSite']


class PbsSite(BatchSite):
    """One queue of a machine with PBS Pro or OpenPBS; see :class:`.options.PbsOptions`."""

    name, job_variable = 'pbspro', 'PBS_JOBID'
    options_type, scheduler_type = PbsOptions, Pbs
    options: PbsOptions


PROGRAMS = 'qsub', 'qstat', 'qdel', 'pbsnodes', 'pbs_rstat'
SITE_TYPE = SiteType('pbspro', 'PBS', PbsSite, PbsOptions, PROGRAMS, ('qstat', '--version'))

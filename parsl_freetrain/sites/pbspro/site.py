"""One queue of a machine with PBS Pro or OpenPBS as a site."""

from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.pbspro.options import PbsOptions
from parsl_freetrain.sites.pbspro.scheduler import Pbs
from parsl_freetrain.sites.registry import SiteType


class PbsSite(BatchSite):
    """One queue of a machine with PBS Pro or OpenPBS; see :class:`.options.PbsOptions`."""

    name, job_variable = 'pbspro', 'PBS_JOBID'
    options_type, scheduler_type = PbsOptions, Pbs
    options: PbsOptions


PROGRAMS = 'qsub', 'qstat', 'qdel', 'pbsnodes', 'pbs_rstat'
SITE_TYPE = SiteType('pbspro', 'PBS', PbsSite, PbsOptions, PROGRAMS, ('qstat', '--version'))

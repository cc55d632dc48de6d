"""PBS Pro and OpenPBS: holes between other people's jobs, and blocks that shrink to fit them."""

from __future__ import annotations

from collections.abc import Callable

from parsl_freetrain.sites.batch.scheduler import Scheduler
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.pbspro.options import PALS, PbsOptions
from parsl_freetrain.sites.pbspro.scheduler import Pbs
from parsl_freetrain.sites.registry import SiteType

__all__ = ['PALS', 'SITE_TYPE', 'PbsOptions', 'PbsSite']


class PbsSite(BatchSite):
    """One queue of a machine with PBS Pro or OpenPBS.

    The parameters are those of :class:`~parsl_freetrain.sites.batch.site.BatchSite`, the settings
    those of :class:`~parsl_freetrain.sites.pbspro.options.PbsOptions`.
    """

    name = 'pbspro'
    job_variable = 'PBS_JOBID'
    options_type = PbsOptions
    options: PbsOptions

    def scheduler(self, clock: Callable[[], float]) -> Scheduler:
        return Pbs(self.options)


SITE_TYPE = SiteType(
    'pbspro',
    'PBS',
    PbsSite,
    PbsOptions,
    programs=('qsub', 'qstat', 'qdel', 'pbsnodes', 'pbs_rstat'),
    version=('qstat', '--version'),
)

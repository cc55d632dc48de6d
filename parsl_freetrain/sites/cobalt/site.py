"""A queue of a machine with Cobalt as a site."""

from __future__ import annotations

from collections.abc import Callable

from parsl_freetrain.sites.batch.scheduler import Scheduler
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.cobalt.options import CobaltOptions
from parsl_freetrain.sites.cobalt.scheduler import Cobalt
from parsl_freetrain.sites.registry import SiteType


class CobaltSite(BatchSite):
    """One queue of a machine with Cobalt.

    The parameters are those of :class:`~parsl_freetrain.sites.batch.site.BatchSite`, the settings
    those of
    :class:`~parsl_freetrain.sites.cobalt.options.CobaltOptions`.
    """

    name = 'cobalt'
    job_variable = 'COBALT_JOBID'
    options_type = CobaltOptions
    options: CobaltOptions

    def scheduler(self, clock: Callable[[], float]) -> Scheduler:
        return Cobalt(self.options, clock)


SITE_TYPE = SiteType(
    'cobalt',
    'Cobalt',
    CobaltSite,
    CobaltOptions,
    programs=('qsub', 'qstat', 'qdel', 'nodelist', 'showres'),
    version=('qstat', '--version'),
)

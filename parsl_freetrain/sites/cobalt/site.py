"""A queue of a machine with Cobalt as a site."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from parsl_freetrain.sites.batch.site import BatchSite, given_options
from parsl_freetrain.sites.cobalt.options import CobaltOptions
from parsl_freetrain.sites.cobalt.scheduler import Cobalt


class CobaltSite(BatchSite):
    """One queue of a machine with Cobalt.

    Parameters
    ----------
    options
        The site config; alternatively its settings as keyword arguments.
    run
        Names this run's jobs, so that they are found again; default: what the executor says, else drawn at random.
    clock
        Wall-clock time in seconds.
    settings
        As :class:`~parsl_freetrain.sites.cobalt.options.CobaltOptions`.

    Raises
    ------
    BadInput
        A setting that cannot be used.
    """

    name = 'cobalt'
    job_variable = 'COBALT_JOBID'
    options: CobaltOptions

    def __init__(self, options: CobaltOptions | None = None, run: str | None = None, clock: Callable[[], float] = time.time,
                 **settings: Any) -> None:
        checked = given_options(CobaltOptions, 'CobaltSite', options, settings)
        super().__init__(checked, Cobalt(checked, clock), run, clock)

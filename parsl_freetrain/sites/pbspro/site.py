"""A queue of a machine with PBS as a site."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from parsl_freetrain.sites.batch.site import BatchSite, given_options
from parsl_freetrain.sites.pbspro.options import PbsOptions
from parsl_freetrain.sites.pbspro.scheduler import Pbs


class PbsSite(BatchSite):
    """One queue of a machine with PBS Pro or OpenPBS.

    Parameters
    ----------
    options
        The site config; alternatively its settings as keyword arguments.
    run
        Names this run's jobs, so that they are found again; default: what the executor says, else drawn at random.
    clock
        Wall-clock time in seconds.
    settings
        As :class:`~parsl_freetrain.sites.pbspro.options.PbsOptions`.

    Raises
    ------
    BadInput
        A setting that cannot be used.
    """

    name = 'pbspro'
    job_variable = 'PBS_JOBID'
    options: PbsOptions

    def __init__(self, options: PbsOptions | None = None, run: str | None = None, clock: Callable[[], float] = time.time,
                 **settings: Any) -> None:
        checked = given_options(PbsOptions, 'PbsSite', options, settings)
        super().__init__(checked, Pbs(checked), run, clock)

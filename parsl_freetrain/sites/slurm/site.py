"""A partition of a machine with Slurm as a site."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from parsl_freetrain.sites.batch.site import BatchSite, given_options
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.scheduler import Slurm


class SlurmSite(BatchSite):
    """One partition of a machine with Slurm.

    Parameters
    ----------
    options
        The site config; alternatively its settings as keyword arguments.
    run
        Names this run's jobs, so that they are found again; default: what the executor says, else drawn at random.
    clock
        Wall-clock time in seconds.
    settings
        As :class:`~parsl_freetrain.sites.slurm.options.SlurmOptions`.

    Raises
    ------
    BadInput
        A setting that cannot be used.
    """

    name = 'slurm'
    job_variable = 'SLURM_JOB_ID'
    options: SlurmOptions

    def __init__(self, options: SlurmOptions | None = None, run: str | None = None, clock: Callable[[], float] = time.time,
                 **settings: Any) -> None:
        checked = given_options(SlurmOptions, 'SlurmSite', options, settings)
        super().__init__(checked, Slurm(checked), run, clock)

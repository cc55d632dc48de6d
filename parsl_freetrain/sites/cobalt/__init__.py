"""Cobalt, the scheduler of Theta: holes from the scheduler's own backfill windows, and blocks that
fit them.
"""

from __future__ import annotations

from parsl_freetrain.sites.batch.options import Mode
from parsl_freetrain.sites.cobalt.options import CobaltOptions
from parsl_freetrain.sites.cobalt.site import SITE_TYPE, CobaltSite

__all__ = ['SITE_TYPE', 'CobaltOptions', 'CobaltSite', 'Mode']

"""Slurm: holes between other people's jobs, and blocks that fit them."""

from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.site import SITE_TYPE, SlurmSite

__all__ = ['SITE_TYPE', 'SlurmOptions', 'SlurmSite']

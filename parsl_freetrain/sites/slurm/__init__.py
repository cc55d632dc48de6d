"""Slurm: holes between other people's jobs, blocks that fit them, and what becomes of the blocks."""

from __future__ import annotations

from parsl_freetrain.sites.slurm.options import Mode, SlurmOptions, read_options
from parsl_freetrain.sites.slurm.site import SlurmSite

__all__ = ['Mode', 'SlurmOptions', 'SlurmSite', 'read_options']

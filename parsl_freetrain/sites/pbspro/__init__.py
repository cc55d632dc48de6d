"""PBS Pro and OpenPBS: holes between other people's jobs, and blocks that shrink to fit them."""

from parsl_freetrain.sites.pbspro.options import PALS, PbsOptions
from parsl_freetrain.sites.pbspro.site import SITE_TYPE, PbsSite

__all__ = ['PALS', 'SITE_TYPE', 'PbsOptions', 'PbsSite']

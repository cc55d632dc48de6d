"""This computer as a site, for a first try and for tests: no batch scheduler is needed."""

from parsl_freetrain.sites.local.site import LocalSite
from parsl_freetrain.sites.registry import SiteType

__all__ = ['SITE_TYPE', 'LocalSite']

SITE_TYPE = SiteType('local', 'this computer', LocalSite)

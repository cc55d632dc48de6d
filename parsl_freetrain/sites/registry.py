"""The types of sites: those of this package, and those that other packages register.

A package registers a type of site as an entry point of the group ``parsl_freetrain.sites``, whose
value is a :class:`SiteType`::

    [project.entry-points.'parsl_freetrain.sites']
    lsf = 'my_package:SITE_TYPE'
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.protocols import Site

logger = logging.getLogger(__name__)

GROUP = 'parsl_freetrain.sites'

# Entry points like any other; written here and not in pyproject.toml, so that they are found
# wherever the package can be imported, also where it was not installed.
_OWN = tuple(
    EntryPoint(name, f'parsl_freetrain.sites.{name}:SITE_TYPE', GROUP)
    for name in ('local', 'slurm', 'pbspro', 'cobalt')
)


@dataclass(frozen=True)
class SiteType:
    name: str  #: as in ``site={'type': 'slurm'}`` of a FreeTrainClient, and a TOML file's table
    label: str  #: its name in sentences
    make: Callable[..., Site]  #: the class of its sites
    options: type[BatchOptions] | None = None  #: the settings of a queue, in a TOML file
    programs: tuple[str, ...] = ()  #: on a login node; the doctor looks for them
    version: tuple[str, ...] = ()  #: the command for the scheduler's version


def site_types() -> dict[str, SiteType]:
    """Every loadable type by name, ours first; others, and double ones, are warned of."""
    found: dict[str, SiteType] = {}
    for point in (*_OWN, *entry_points(group=GROUP)):
        try:
            kind = point.load()
        except Exception as error:  # another package's code
            said = 'The site type %s (%s) cannot be loaded: %s'
            logger.warning(said, point.name, point.value, error)
            continue
        if not isinstance(kind, SiteType):
            logger.warning('The site type %s (%s) is no SiteType', point.name, point.value)
        elif found.setdefault(kind.name, kind) is not kind:
            logger.warning('%s registers a second site type %r', point.value, kind.name)
    return found

"""A Parsl configuration to run a small training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import parsl
from parsl.config import Config

from parsl_freetrain import FreeTrainExecutor, HtexOptions, Policy, Timeouts
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.sites.protocols import Site
from parsl_freetrain.sites.provider import BackfillProvider
from tests.support.fit import fit, weights

__all__ = ['fit', 'freetrain', 'weights']


@contextmanager
def freetrain(
    folder: Path, site: Site, *, parsl_retries: int = 0, **settings: Any
) -> Iterator[FreeTrainExecutor]:
    """A configuration with one executor on ``site``; settings of groups by name, as hang_s=4."""
    settings = {'max_workers_per_node': 0, 'horizon_s': 20.0, **settings}
    groups: dict[str, type[Settings]] = {
        'policy': Policy,
        'timeouts': Timeouts,
        'htex': HtexOptions,
    }
    grouped: dict[str, Any] = {
        name: kind(**{f: settings.pop(f) for f in kind.__struct_fields__ if f in settings})
        for name, kind in groups.items()
    }
    executor = FreeTrainExecutor(
        provider=BackfillProvider(
            site=site,
            min_hole_s=settings.pop('min_hole_s', 1.0),
            environment=settings.pop('environment', None),
        ),
        checkpoint_dir=str(folder / 'checkpoints'),
        **grouped,
        **settings,
    )
    with parsl.load(
        Config(
            executors=[executor],
            strategy='none',
            retries=parsl_retries,
            run_dir=str(folder / 'runinfo'),
        )
    ):
        yield executor

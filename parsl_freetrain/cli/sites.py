"""The site that ``--site`` names: a name, a Python file or a TOML file."""

from collections.abc import Sequence
from pathlib import Path

from parsl.config import Config

from parsl_freetrain.core.model.errors import BadInput, of_user
from parsl_freetrain.core.model.types import Hole
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.named import load_site_file, site_files, site_in_table
from parsl_freetrain.sites.protocols import Site
from parsl_freetrain.sites.provider import BackfillProvider


def provider_of(given: str | None) -> BackfillProvider:
    """What ``--site`` names: ``local``, a TOML file, a Python file with ``config()``, a name."""
    if given is None:
        raise BadInput(f'Name a site with --site: one of {_known()}, or a .py or .toml file.')
    path = Path(given)
    if path.suffix == '.toml':
        return BackfillProvider(site_in_table(path))
    if file := file_of(given):
        return _executor(_configured(file), given)[1]
    if given == 'local':
        return BackfillProvider(LocalSite())
    raise BadInput(f'There is no site {given!r}; name one of {_known()}, or a .py or .toml file.')


def _known() -> str:
    return ', '.join(['local', *sorted(site_files())])


def config_of(given: str) -> tuple[Config, FreeTrainExecutor]:
    """The configuration and executor of a site: a file's own, or all defaults and checkpoints/."""
    if file := file_of(given):
        config = _configured(file)
        return config, _executor(config, given)[0]
    executor = FreeTrainExecutor(provider=provider_of(given))
    return Config(executors=[executor]), executor


def _executor(config: Config, given: str) -> tuple[FreeTrainExecutor, BackfillProvider]:
    for executor in config.executors:
        if isinstance(executor, FreeTrainExecutor) and isinstance(
            executor.provider, BackfillProvider
        ):
            return executor, executor.provider
    raise BadInput(
        f'The configuration of the site {given} has no FreeTrainExecutor, so there is no site.'
    )


def _configured(path: Path) -> Config:
    module = load_site_file(path)
    with of_user(f'The site file {path} gives no configuration'):
        config = module.config()
    if not isinstance(config, Config):
        raise BadInput(
            f'The site file {path} gives no configuration: its config() returns {config!r}; it '
            'must return a parsl.config.Config with a FreeTrainExecutor.'
        )
    return config


def file_of(given: str) -> Path | None:
    """The Python file of a site, by path or by name; None if it has none."""
    return Path(given) if given.endswith('.py') else site_files().get(given)


def holes_of(site: Site) -> Sequence[Hole]:
    if isinstance(site, BatchSite):
        return site.holes_now()
    site.start()
    found = site.holes()
    site.close()
    return found

"""Sites by name (the Python files of ``site_configs/``), and sites in TOML files."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from parsl_freetrain.core.model.checked_settings import read_settings
from parsl_freetrain.core.model.errors import BadInput, of_user
from parsl_freetrain.host.files import read_toml
from parsl_freetrain.sites.protocols import Site
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.registry import site_types

_PACKAGE = Path(__file__).resolve().parents[1]
# In the current folder, for a user's own copies; installed with the package; in the repository.
_FOLDERS = (Path('site_configs'), _PACKAGE / 'site_configs', _PACKAGE.parent / 'site_configs')


def site_files() -> dict[str, Path]:
    """The Python files of sites by name; the current folder's ``site_configs/`` comes first."""
    files = (path for folder in reversed(_FOLDERS) for path in sorted(folder.glob('[!_]*.py')))
    return {path.stem: path for path in files}


def load_site_file(path: Path) -> ModuleType:
    """The module of a site's Python file, executed. Raises BadInput if that cannot be done."""
    spec = importlib.util.spec_from_file_location('freetrain_site_config', path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BadInput(
            f'The site file {path} cannot be read; name a Python file with a function config().'
        )
    module = importlib.util.module_from_spec(spec)
    with of_user(f'The site file {path} gives no configuration'):
        spec.loader.exec_module(module)
    return module


def site_in_table(path: Path) -> Site:
    """The site of a TOML file, by the table of its type (none: Slurm); BadInput if unusable."""
    values = read_toml(path, 'The site file', 'name a TOML file with the settings of a site')
    types = {name: kind for name, kind in site_types().items() if kind.options is not None}
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    name = next((name for name in tables if name in types), 'slurm')
    kind = types[name]
    if name not in tables and len(tables) == len(values) > 0:
        raise BadInput(
            f'The site file {path} has the table {", ".join(tables)}; name it after the type of '
            f'the site, which is one of {", ".join(types)}.'
        )
    assert kind.options is not None
    return kind.make(read_settings(kind.options, f'The site file {path}', tables.get(name, values)))


def chosen_provider(
    provider: BackfillProvider | None,
    site: str | None,
    account: str | None = None,
    queue: str | None = None,
) -> BackfillProvider:
    """The given provider, or one for a site's name, account and queue; BadInput for both."""
    named = {'name': site, 'account': account, 'queue': queue}
    settings = {name: value for name, value in named.items() if value is not None}
    if provider is None:
        return BackfillProvider(site_described({'name': '', **settings}))
    if settings:
        raise BadInput(
            'FreeTrainExecutor was given a provider and a site, account or queue; '
            'give provider= alone, or site= as a name.'
        )
    return provider


def site_described(described: str | Mapping[str, Any]) -> Site:
    """The site that plain data describe: a name or TOML file, or ``{'name': 'polaris', ...}`` (a
    file of ``site_configs/`` whose function ``site()`` takes the other items), or ``{'type':
    'slurm', ...}`` and its settings. Raises BadInput for another name, type or settings.
    """
    settings = {'name': described} if isinstance(described, str) else dict(described)
    if str(settings.get('name')).endswith('.toml'):
        path = Path(settings.pop('name'))
        if settings:
            raise BadInput(
                f'The site file {path} has all settings: write {", ".join(settings)} there.'
            )
        return site_in_table(path)
    types, files = site_types(), site_files()
    kind, name = settings.pop('type', None), settings.pop('name', None)
    if name in types and name not in files:
        kind, name = name, None
    if kind in types and name is None:
        make, where = types[kind].make, f'The site type {kind}'
    elif kind is not None or name not in files:
        with_site = (each for each, path in files.items() if 'def site(' in path.read_text())
        raise BadInput(
            f'There is no site {kind or name or ""!r}; give provider=, or site= as one of '
            f'{", ".join(sorted(with_site))}, a type of site ({", ".join(types)}), or a .toml file.'
        )
    else:
        where, module = f'The site file {files[name]}', load_site_file(files[name])
        if not hasattr(module, 'site'):
            raise BadInput(f'{where} has no function site(); give provider=, or use its config().')
        make = module.site
    with of_user(f'{where} gives no site'):
        site: Site = make(**settings)
    return site

"""``freetrain globus-init``: writes the files of a Globus Compute endpoint that trains in holes."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host import files

TEMPLATE, SCHEMA, ENVIRONMENT = FILES = (
    'user_config_template.yaml.j2',
    'user_config_schema.json',
    'user_environment.yaml',
)
KEPT = '.before-freetrain'


def globus_init(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar='DIR',
            help='The folder of an endpoint, such as ~/.globus_compute/MY_ENDPOINT, which '
            '"globus-compute-endpoint configure MY_ENDPOINT" has made.',
        ),
    ],
    site: Annotated[
        str, typer.Option(metavar='NAME', help='The machine: polaris, crux or aurora.')
    ] = 'polaris',
    account: Annotated[
        str, typer.Option(metavar='NAME', help='The project that pays, if users name none.')
    ] = '',
    checkpoint_dir: Annotated[
        str, typer.Option(metavar='DIR', help='The folder for checkpoints, if users name none.')
    ] = '',
) -> None:
    """Write the three files that make an endpoint of Globus Compute train in holes.

    Files of these names that are there already are kept, with the ending .before-freetrain.
    """
    from parsl_freetrain.executor.globus.registration import FOLDER
    from parsl_freetrain.sites.named import load_site_file, shared_folder, site_files

    if not folder.is_dir():
        raise BadInput(
            f'There is no folder {folder}; make it with "globus-compute-endpoint configure '
            f'{folder.name}", or name another one.'
        )
    if checkpoint_dir and not Path(checkpoint_dir).is_absolute():
        raise BadInput(f'--checkpoint-dir is {checkpoint_dir!r}; it must be an absolute path.')
    known = site_files()
    machine = load_site_file(known[site]) if site in known else None
    queues = getattr(machine, 'QUEUES', {})
    if not queues or not hasattr(machine, 'FILE_SYSTEMS'):
        raise BadInput(
            f'There is no template for the site {site!r}; name polaris, crux or aurora, or copy '
            f'{shared_folder("globus")} and change it.'
        )
    assert machine is not None
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(machine.site).parameters.items()
    }
    ours = {name: (shared_folder('globus') / name).read_text() for name in FILES}
    ours[TEMPLATE] = _template(ours[TEMPLATE], site, defaults, account, checkpoint_dir)
    schema = json.loads(ours[SCHEMA].replace('Polaris', site.capitalize()))
    schema['properties']['queue']['enum'] = list(queues)
    given = {'account': account, 'checkpoint_dir': checkpoint_dir}
    schema['required'] = [name for name in schema['required'] if not given[name]]
    ours[SCHEMA] = json.dumps(schema, indent=2) + '\n'
    ours[ENVIRONMENT] = re.sub(
        r'^PYTHONPATH: .*$',
        lambda _: f'PYTHONPATH: {json.dumps(str(FOLDER))}',
        ours[ENVIRONMENT],
        flags=re.M,
    )
    _write(folder, ours)


def _template(
    text: str, site: str, defaults: dict[str, Any], account: str, checkpoint_dir: str
) -> str:
    text = text.replace('Polaris', site.capitalize()).replace('polaris', site)
    text = text.replace('preemptable', defaults['queue'])
    text = text.replace(
        """['"home"', '"eagle"']""", str([f'"{name}"' for name in defaults['filesystems']])
    )
    for name, value in (('account', account), ('checkpoint_dir', checkpoint_dir)):
        if value:
            text = text.replace(
                f'{{{{ {name} }}}}', f'{{{{ {name} | default({json.dumps(json.dumps(value))}) }}}}'
            )
    return text


def _write(folder: Path, ours: dict[str, str]) -> None:
    changed = {
        name: text
        for name, text in ours.items()
        if not (folder / name).exists() or (folder / name).read_text() != text
    }
    for name in changed:
        path, kept = folder / name, folder / f'{name}{KEPT}'
        if path.exists() and kept.exists():
            raise BadInput(
                f'{path} would be replaced, and {kept} is there already: remove one of them.'
            )
    for name, text in changed.items():
        path = folder / name
        if path.exists():
            path.rename(folder / f'{name}{KEPT}')
        files.write_new(path, text.encode())
        print(f'{path} written')
    if not changed:
        print(f'{folder} has these files already.')

"""``freetrain doctor``: what is measured here and on the nodes, and what it means for trainings."""

import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parsl_freetrain import __version__
from parsl_freetrain.cli.doctor.checks import Finding, findings
from parsl_freetrain.cli.where import JsonOption, value
from parsl_freetrain.core.model.errors import BadInput, clean, of_file
from parsl_freetrain.host import files

PORTS = {'54000-55000': (54000, 55000), '55000-56000': (55000, 56000)}
"""The executor's default ranges: for workers, and for its interchange and control channel."""

STYLES = {'ok': 'green', 'note': 'yellow', 'bad': 'bold red'}


def doctor(
    checkpoints: Annotated[Path, value('DIR', 'The folder where checkpoints will go.')] = Path(),
    through: Annotated[
        str, value('COMMAND', 'Also examine a node, reached by a command such as "srun -N1".')
    ] = '',
    endpoint: Annotated[
        str, value('ID', 'Also compare versions with this Globus Compute endpoint.')
    ] = '',
    endpoint_options: Annotated[
        Path | None, value('FILE', "JSON options for the endpoint's template.")
    ] = None,
    site: Annotated[
        str, value('NAME|FILE', "Also compare a site's file with what its scheduler says.")
    ] = '',
    nodes: Annotated[
        int, value('N', 'With --site: also submit a job of N nodes that examines them.')
    ] = 0,
    wait: Annotated[float, value('S', 'Maximum seconds to wait for this job.')] = 900.0,
    environment: Annotated[
        bool,
        typer.Option(help='Also measure whether to pack the environment for the nodes (minutes).'),
    ] = False,
    out: Annotated[Path, value('FILE', 'The file to write.')] = Path('freetrain-doctor.json'),
    as_json: JsonOption = False,
) -> int:
    """Examine this computer, and a compute node if you like, and write the result into a file.

    Examined are versions, torch, GPUs, the batch system, the file system, ports and clocks. The
    file system is measured in a new folder in DIR, which is removed afterwards. The file is meant
    for bug reports; it names hosts, paths and users. The exit status is 1 if something was found
    that keeps trainings from working.

    With --site, every queue that the site's file states is compared with the scheduler's, and the
    line of the file that is out of date is named. Nothing is submitted unless --nodes is given.
    """
    from parsl_freetrain.cli.doctor.measuring import ask_endpoint, imports

    if not checkpoints.is_dir() or not os.access(checkpoints, os.W_OK):
        raise BadInput(
            f'{checkpoints} is not a folder that can be written to; name one with --checkpoints.'
        )
    if nodes < 0 or (nodes and not site):
        raise BadInput('--nodes is the number of nodes of a job at a site; name one with --site.')
    folder, of_site = checkpoints.absolute(), []
    if site:
        from parsl_freetrain.cli.doctor.site import examine

        of_site = examine(site, folder, nodes, wait)
    facts = _facts(folder, through)
    found = findings(facts) + of_site
    more: dict[str, Any] = {}
    if environment:
        more['imports'] = imports(Path(sys.prefix), folder)
    if endpoint:
        more['endpoint'] = ask_endpoint(endpoint, endpoint_options)
    found += findings(more)
    document = {**facts, **more, 'findings': [vars(finding) for finding in found]}
    with of_file(f'The file {out} cannot be written', 'name another one with --out'):
        files.replace(out, json.dumps(document, indent=1).encode())
    if as_json:
        print(json.dumps(document))
    else:
        _show(found)
        print(f'All of it is in {out}.')
    return int(any(finding.state == 'bad' for finding in found))


def _facts(folder: Path, through: str) -> dict[str, Any]:
    from parsl.addresses import get_all_addresses

    from parsl_freetrain.cli.doctor.measuring import (
        ask,
        ask_there,
        file_system,
        free_ports,
        programs,
    )
    from parsl_freetrain.sites.registry import site_types

    try:
        command = shlex.split(through)
    except ValueError as error:
        raise BadInput(f'--through {through!r} is not a command: {error}.') from error
    addresses = sorted(get_all_addresses())
    types = site_types().values()
    facts: dict[str, Any] = {
        'freetrain': __version__,
        'at': time.time(),
        'system': ' '.join(platform.uname()),
        'command': sys.orig_argv,
        'here': ask([], {}),
        'schedulers': {kind.label: list(kind.programs) for kind in types if kind.programs},
        'programs': programs(types),
        'file_system': file_system(folder),
        'ports': {
            'addresses': addresses,
            'free': {span: free_ports(*ends) for span, ends in PORTS.items()},
        },
    }
    if command:
        outside = [a for a in addresses if not a.startswith('127.')]
        facts['node'] = ask_there(command, folder, outside or addresses)
    return facts


def _show(found: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow='fold')
    for one in found:
        table.add_row(Text(one.state, STYLES[one.state]), one.what, Text(clean(one.says)))
    Console().print(table)

"""Batch scripts for qsub of Cobalt; every value of a user is quoted."""

from __future__ import annotations

import re

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.block_shape import BlockShape, Place
from parsl_freetrain.sites.batch.shell import batch_script, run_with_launcher, until_deadline
from parsl_freetrain.sites.cobalt.options import CobaltOptions

_GRACE_S = 10.0


def render(
    options: CobaltOptions, shape: BlockShape, place: Place, command: str, worker_init: str = ''
) -> str:
    """The batch script of one block.

    It runs on a service node, and aprun starts one process on each compute node.

    Parameters
    ----------
    command
        What each node runs, as a shell command.
    worker_init
        Shell lines after those of the options.

    Raises
    ------
    BadInput
        A path with a space or a quote, which Cobalt's directives cannot hold.
    """
    launch = ['aprun', '-n', str(shape.nodes), '-N', '1', *options.aprun_options]
    return batch_script(
        (f'#COBALT {line}' for line in _directives(options, shape, place)),
        options,
        worker_init,
        _LIFETIME.format(limit=shape.walltime_s) + until_deadline(shape.deadline),
        run_with_launcher(launch, command, _GRACE_S),
    )


def _directives(options: CobaltOptions, shape: BlockShape, place: Place) -> list[str]:
    attrs = {**options.modes(), **options.attrs}
    if options.filesystems:
        attrs['filesystems'] = ','.join(options.filesystems)
    if shape.names:
        attrs['location'] = ','.join(str(int(name.removeprefix('nid'))) for name in shape.names)
    said = [
        f'--jobname {place.name}',
        f'-o {_path(place.stdout)}',
        f'-e {_path(place.stderr)}',
        f'--debuglog {_path(log_of(place))}',
        f'-q {options.queue}',
        f'-n {shape.nodes}',
        f'-t {shape.walltime_s // 60}',
    ]
    if options.account is not None:
        said.append(f'-A {options.account}')
    if attrs:
        said.append('--attrs ' + ':'.join(f'{name}={value}' for name, value in attrs.items()))
    return [*said, *options.cobalt_options]


def log_of(place: Place) -> str:
    """Cobalt's own record of a job, which outlives it."""
    return f'{place.stdout.removesuffix(".out")}.cobaltlog'


def _path(path: str) -> str:
    if re.search(r'[\s\'"\\]', path):
        raise BadInput(
            f'Cobalt cannot write to {path!r}, because of a space, a quote or a backslash in it; '
            f'use a folder with another name.'
        )
    return path


_LIFETIME = """case $COBALT_ENDTIME in
    ''|*[!0-9]*) left=$(({limit} - SECONDS)) ;;
    *) left=$((COBALT_ENDTIME - $(date +%s))) ;;
esac
"""

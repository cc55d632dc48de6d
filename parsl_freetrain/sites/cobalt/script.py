"""Batch scripts for Cobalt's qsub: pure text, every value of a user's quoted."""

from __future__ import annotations

import math
import re
import shlex

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.sites.batch.shape import BlockShape, Place
from parsl_freetrain.sites.batch.shell import on_each_node
from parsl_freetrain.sites.cobalt.options import CobaltOptions


def render(options: CobaltOptions, shape: BlockShape, place: Place, command: str, worker_init: str = '') -> str:
    """The batch script of one block; it runs on a service node, and aprun starts one process on each compute node.

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
    head = '\n'.join(f'#COBALT {line}' for line in _directives(options, shape, place))
    init = ''.join(f'{lines.strip()}\n' for lines in (options.worker_init, worker_init) if lines.strip())
    aprun = shlex.join(['aprun', '-n', str(shape.nodes), '-N', '1', *options.aprun_options])
    deadline = '' if shape.deadline is None else _DEADLINE.format(deadline=shape.deadline)
    return _SCRIPT.format(head=head, init=init, aprun=aprun, node=shlex.quote(on_each_node('"$(hostname -s)"', forwards=True)),
                          command=shlex.quote(command), limit=shape.walltime_s, ending=math.ceil(options.ending_s), deadline=deadline)


def _directives(options: CobaltOptions, shape: BlockShape, place: Place) -> list[str]:
    attrs = {**options.modes(), **options.attrs}
    if options.filesystems:
        attrs['filesystems'] = ','.join(options.filesystems)
    if shape.names:
        attrs['location'] = ','.join(str(int(name.removeprefix('nid'))) for name in shape.names)
    said = [f'--jobname {place.name}', f'-o {_path(place.stdout)}', f'-e {_path(place.stderr)}', f'--debuglog {_path(log_of(place))}',
            f'-q {options.queue}', f'-n {shape.nodes}', f'-t {shape.walltime_s // 60}']
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
        raise BadInput(f'Cobalt cannot write to {path!r}, because of a space, a quote or a backslash in it; '
                       f'use a folder with another name.')
    return path


_SCRIPT = """#!/bin/bash
{head}

SECONDS=0
{init}
case $COBALT_ENDTIME in
    ''|*[!0-9]*) left=$(({limit} - SECONDS)) ;;
    *) left=$((COBALT_ENDTIME - $(date +%s))) ;;
esac
{deadline}left=$((left - {ending}))
[ "$left" -gt 0 ] || exit 0

node={node}
trap '[ -z "$running" ] || kill -TERM "$running" 2>/dev/null' TERM
timeout --kill-after=10 "$left" {aprun} /bin/bash -c "$node" freetrain-node {command} </dev/null &
running=$!
while kill -0 "$running" 2>/dev/null; do wait "$running"; done
wait "$running"; status=$?
[ "$status" != 124 ] || status=0
exit "$status"
"""

_DEADLINE = """hole=$(({deadline} - $(date +%s)))
[ "$hole" -ge "$left" ] || left=$hole
"""

"""What the batch scripts of all schedulers have in common, as shell text."""

import math
import shlex
from collections.abc import Iterable, Sequence

from parsl_freetrain.sites.batch.options import BatchOptions


def batch_script(
    directives: Iterable[str], options: BatchOptions, worker_init: str, lifetime: str, run: str
) -> str:
    """The batch script of one block: the ``directives``, the options' shell lines and those of
    ``worker_init``; ``lifetime``, lines that set ``left``, the seconds until the scheduler ends the
    job; and ``run``, lines that run the block for ``left`` seconds and set ``status``.
    """
    head = '\n'.join(directives)
    inits = (options.worker_init.strip(), worker_init.strip())
    init = ''.join(f'{lines}\n' for lines in inits if lines)
    return f"""#!/bin/bash
{head}

SECONDS=0
{init}
set +eu  # what follows looks at statuses
{lifetime}left=$((left - {math.ceil(options.ending_s)}))
[ "$left" -gt 0 ] || exit 0

{run}[ "$status" != 124 ] || status=0
exit "$status"
"""


def until_deadline(deadline: int | None, hole_s: int | None = None) -> str:
    """Shell lines that shorten ``left`` to end by a time, by the scheduler's clock if told."""
    if deadline is None:
        return ''
    known = f'[ -z "$waited" ] || hole=$(({hole_s} - waited - SECONDS))\n'
    return f"""hole=$(({deadline} - $(date +%s)))
{known if hole_s is not None else ''}[ "$hole" -ge "$left" ] || left=$hole
"""


def run_with_launcher(launch: Sequence[str], command: str, grace_s: float) -> str:
    """Shell lines that run a command on each node by ``launch``, and pass a SIGTERM on."""
    return f"""node={shlex.quote(on_each_node('"$(hostname -s)"', forwards=True))}
trap '[ -z "$running" ] || kill -TERM "$running" 2>/dev/null' TERM
timeout --foreground --kill-after={math.ceil(grace_s)} "$left" {shlex.join(launch)} \
/bin/bash -c "$node" freetrain-node {shlex.quote(command)} </dev/null &
running=$!
while kill -0 "$running" 2>/dev/null; do wait "$running"; done
wait "$running"; status=$?
"""


def on_each_node(name: str, forwards: bool = False) -> str:
    """What runs on each node of a block, with the node's command as its first argument; ``name``: a
    shell word, the node's name. ``forwards``: the scheduler's signals reach only the first process
    of a node, which passes them on. The command stays in this shell's process group, as some
    schedulers stop and kill only that; the node agent ends with this shell. At a preemption the
    command gets SIGTERM, and this shell waits for it: a signal interrupts a ``wait``, so its status
    is asked for at the end.
    """
    passed_on = (
        f'trap \'[ -z "$command" ] || kill -{signal} "$command" 2>/dev/null\' {signal}'
        for signal in ('TERM', 'USR1')
    )
    traps = '\n'.join(passed_on) if forwards else 'trap : TERM USR1'
    return f"""export FREETRAIN_NODE={name} FREETRAIN_NODE_SHELL=$$
{traps}
/bin/bash -c "$1" &
command=$!
while kill -0 "$command" 2>/dev/null; do wait "$command"; done
wait "$command"; status=$?
[ "$status" != 137 ] || kill -KILL 0
exit "$status"
"""

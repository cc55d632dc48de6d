"""What the batch scripts of all schedulers have in common, as shell text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence

from parsl_freetrain.sites.batch.options import BatchOptions


def batch_script(
    directives: Iterable[str], options: BatchOptions, worker_init: str, lifetime: str, run: str
) -> str:
    """The batch script of one block: the ``directives`` (complete lines for the scheduler, such as
    ``#SBATCH --nodes=2``), the options' shell lines and those of ``worker_init``; ``lifetime``,
    lines that set ``left``, the seconds until the scheduler ends the job (``SECONDS`` counts from
    its beginning); and ``run``, lines that run the block for ``left`` seconds, by ``timeout``, and
    set ``status``.
    """
    head = '\n'.join(directives)
    inits = (options.worker_init.strip(), worker_init.strip())
    init = ''.join(f'{lines}\n' for lines in inits if lines)
    return f"""#!/bin/bash
{head}

SECONDS=0
{init}
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
    """What runs on each node of a block, with the command of the node as its first argument.
    ``name``: a shell word that is the node's name there. ``forwards``: the scheduler's signals
    reach only the first process of a node, which then passes them on.

    The command stays in the process group in which the scheduler started this shell, since some
    schedulers stop, continue and kill only that. The node agent ends with this shell and ends what
    it has started; where it was killed, this shell kills the group, itself included. At a
    preemption the command gets SIGTERM and knows what to do; this shell waits for it. A signal
    interrupts a ``wait``, and the command may be over before the first one, so its status is asked
    for once it is gone.
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

"""Shell text that the batch scripts of all schedulers share."""

from __future__ import annotations


def on_each_node(name: str, forwards: bool = False) -> str:
    """What runs on each node of a block, with the command of the node as its first argument.

    Parameters
    ----------
    name
        A shell word that is the node's name there.
    forwards
        Whether the scheduler's signals reach only the first process of a node, which passes them on then.

    Notes
    -----
    The command has a process group of its own, so that nothing that it started outlives it and holds the node. At a preemption
    it gets SIGTERM and knows what to do then; this waits for it. A signal interrupts a ``wait``, and the command may be over before the
    first one: its status is asked for once it is gone.
    """
    traps = 'trap : TERM USR1' if not forwards else '\n'.join(
        f'trap \'[ -z "$command" ] || kill -{signal} -- "-$command" 2>/dev/null\' {signal}' for signal in ('TERM', 'USR1'))
    return f"""export FREETRAIN_NODE={name}
{traps}
setsid /bin/bash -c "$1" &
command=$!
while kill -0 "$command" 2>/dev/null; do wait "$command"; done
wait "$command"; status=$?
kill -KILL -- "-$command" 2>/dev/null
exit "$status"
"""

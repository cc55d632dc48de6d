"""Compares what is asked for with what the queue allows, before anything is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import Nodes, Partition


def within(queue: Partition, options: BatchOptions, step_s: int) -> Partition:
    """The queue with the limits of the site config, too. Raises BadInput if there is no block that
    fits them all. ``step_s``: walltimes are multiples of this, in seconds.
    """
    least = max(queue.least_nodes, options.least_nodes)
    most = min((n for n in (queue.most_nodes, options.most_nodes) if n is not None), default=None)
    if most is not None and least > most:
        raise BadInput(
            f'The queue {queue.name!r} takes {queue.least_nodes} to '
            f'{queue.most_nodes or "any number of"} nodes, and the site config asks for '
            f'{options.least_nodes} to {options.most_nodes or "any number of"}; name another queue.'
        )
    shortest_s = max(float(step_s), queue.shortest_s, options.shortest_s)
    if shortest_s > (queue.longest_s or shortest_s) or shortest_s > options.unplanned_s:
        limit = '' if queue.longest_s is None else f' and its time limit {queue.longest_s:g} s'
        raise BadInput(
            f'The shortest block in the queue {queue.name!r} is {shortest_s:g} s{limit}, '
            'and longest_s in the site config is '
            f'{options.unplanned_s:g}; name another queue, or change shortest_s or longest_s.'
        )
    return replace(queue, least_nodes=least, most_nodes=most, shortest_s=shortest_s)


def check_classes(classes: Sequence[str], nodes: Sequence[Nodes], queue: Partition) -> None:
    """Raises BadInput, with the class and the queue, for a node class that no node has."""
    there = {group.node_class for group in nodes if group.partition == queue.name}
    for name in classes:
        if name not in there:
            raise BadInput(
                f'The site config has the node class {name!r}, and no node of the queue '
                f'{queue.name!r} is of it; correct its entry in node_classes, or leave it out.'
            )


def check_request(request: BlockRequest, queue: Partition) -> None:
    """Refuse what the queue can never give. Raises BadInput for no node, too few or too many nodes,
    other names than nodes, or too short a walltime.
    """
    if request.nodes < 1 or (request.names and len(request.names) != request.nodes):
        raise BadInput(
            f'A block of {request.nodes} nodes with the names {list(request.names)} was asked for; '
            f'it must have at least one node, and as many names as nodes, or none.'
        )
    if request.nodes < queue.least_nodes or request.nodes > (queue.most_nodes or request.nodes):
        raise BadInput(
            f'A block of {request.nodes} nodes was asked for; the queue {queue.name!r} allows '
            f'{queue.least_nodes} to {queue.most_nodes or "any number of"} nodes.'
        )
    if request.walltime_s is not None and request.walltime_s < queue.shortest_s:
        raise BadInput(
            f'A block of {request.walltime_s:g} s was asked for; the shortest in the queue '
            f'{queue.name!r} needs {queue.shortest_s:g} s or more.'
        )

"""Files of node habits: what a record has shown, and of which machine."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from parsl_freetrain.core.controller.node_habits import NodeHabits, learn
from parsl_freetrain.core.model.errors import BadInput, of_file
from parsl_freetrain.replay.trace import Trace


class HabitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: Annotated[list[str], msgspec.Meta(min_length=1)]
    habits: NodeHabits


def habits_of(trace: Trace) -> NodeHabits:
    """The habits that a trace shows; raises BadInput where no node leaves."""
    starts, ends, nodes, _ = trace.intervals()
    rank = np.empty(len(trace.names), dtype=np.int64)
    rank[np.argsort(trace.names)] = np.arange(len(trace.names))
    return learn(starts, ends, rank[nodes], trace.start_s, trace.end_s)


def write_habits(trace: Trace, path: Path) -> None:
    """Write a trace's habits; raises BadInput if no node leaves, or the file cannot be written."""
    found = HabitsFile(sorted(trace.names), habits_of(trace))
    with of_file(f'The habits cannot be written to {path}', 'name another file'):
        path.write_bytes(msgspec.json.encode(found) + b'\n')


def read_habits(path: str | Path, nodes: Collection[str] | None = None) -> NodeHabits:
    """What :func:`write_habits` wrote; BadInput if of fewer nodes than most of ``nodes``."""
    remedy = 'name a file that freetrain replay --learn-habits has written'
    with of_file(f'The habits {path} cannot be read', remedy):
        content = Path(path).read_bytes()
    try:
        found = msgspec.json.decode(content, type=HabitsFile)
    except msgspec.DecodeError as error:
        raise BadInput(
            f'{path} is not a file of habits ({error}); replay --learn-habits writes one.'
        ) from None
    if nodes is not None and len(set(nodes) & set(found.nodes)) < len(nodes) / 2:
        raise BadInput(
            f'The habits {path} are of another machine, with nodes such as '
            f'{", ".join(found.nodes[:2])}; most nodes of this one, such as '
            f'{", ".join(sorted(nodes)[:2])}, are not among them. Learn them from a record of this '
            'machine.'
        )
    return found.habits

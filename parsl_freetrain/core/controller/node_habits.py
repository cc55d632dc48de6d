"""Which idle nodes stay longest: the hazard by age, and the order in which they are taken."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from parsl_freetrain.core.controller.node_pool import PoolNode
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import MAX, NotNegative, Share
from parsl_freetrain.core.model.errors import BadInput, refuse

AGES_S = (0.0, 60.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 2400.0, 4800.0)
"""Where the bins of age begin, in seconds."""

CLEAR = 0.15  # mean positions of nodes that leave further from the middle count as an order

LEAST = 100  # number of departures that teach a hazard as much as the bins together do
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class NodeHabits(Settings, frozen=True, kw_only=True):
    """How long idle nodes stay; as :func:`learn` finds them in a record. Raises BadInput."""

    hazard: tuple[NotNegative, ...]
    position: Share = 0.5
    together: Annotated[float, Meta(ge=1, le=MAX)] = 1.0

    def __post_init__(self) -> None:
        if len(self.hazard) != len(AGES_S):
            refuse('NodeHabits: hazard', list(self.hazard), f'{len(AGES_S)} numbers')

    def order(self, nodes: Iterable[PoolNode], at: float) -> list[str]:
        """The names of nodes, by how long they are expected to stay from ``at`` on."""
        by_host = sorted(nodes, key=lambda node: node.host or node.name)
        if abs(self.position - 0.5) > CLEAR:
            if self.position < 0.5:
                by_host.reverse()
            return [node.name for node in by_host]
        staying = sorted(by_host, key=lambda node: self._now(at - node.since_s))
        return [node.name for node in staying]

    def interruptions_per_s(self, nodes: Sequence[PoolNode], at: float) -> float:
        """How often some of these nodes leave: ``together`` neighbours go at a time."""
        each = sum(self._now(at - node.since_s) for node in nodes) / len(nodes)
        return each * (len(nodes) + self.together - 1) / self.together

    def _now(self, age_s: float) -> float:
        return self.hazard[bisect_right(AGES_S, max(age_s, 0.0)) - 1]


def learn(starts: Floats, ends: Floats, nodes: Ints, begin_s: float, end_s: float) -> NodeHabits:
    """The habits in intervals of idle nodes by sorted name; BadInput if none departs."""
    left = ends < end_s
    if not left.any():
        raise BadInput(
            'No idle node leaves in this record, so it does not show how long nodes stay; give a '
            'longer one.'
        )
    # Where all nodes were idle from the beginning, their ages are not known any better.
    whole = starts > begin_s if (starts > begin_s).any() else starts >= begin_s
    lasted_s, gone = (ends - starts)[whole], left[whole]
    mean_s = lasted_s.sum() / max(gone.sum(), 1)
    hazard = []
    for begins, end in zip(AGES_S, (*AGES_S[1:], np.inf), strict=True):
        seen_s = np.clip(lasted_s - begins, 0.0, end - begins).sum()
        departed = (gone & (begins <= lasted_s) & (lasted_s < end)).sum()
        hazard.append(float((departed + LEAST) / (seen_s + LEAST * mean_s)))
    together = float(left.sum() / len(np.unique(ends[left])))
    position = _position(starts, ends, nodes, left)
    return NodeHabits(hazard=tuple(hazard), position=position, together=together)


def _position(starts: Floats, ends: Floats, nodes: Ints, left: npt.NDArray[np.bool_]) -> float:
    """The mean over all departures that take some of the idle nodes, and not nearly all."""
    found = []
    for at in np.unique(ends[left]):
        here = np.flatnonzero((starts < at) & (ends >= at))
        goes = ends[here[np.argsort(nodes[here])]] == at
        if goes.sum() <= 0.9 * len(here):
            found.append(np.flatnonzero(goes).mean() / (len(here) - 1))
    return float(np.mean(found)) if found else 0.5

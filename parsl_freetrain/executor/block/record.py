"""What is kept of a block that has not ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from parsl_freetrain.core.model.types import BlockRequest


@dataclass
class BlockRecord:
    """A block that has not ended.

    Attributes
    ----------
    until_s
        Its end in seconds since the epoch; None if unknown.
    greeted
        Managers that were sent a first task.
    answering
        Greeted managers whose first task has not returned.
    nodes
        Host names of the ready nodes, by manager id.
    unusable
        Managers whose first task failed, or that were lost.
    left
        Managers that had nodes which the scheduler has taken.
    noticed
        Whether the scheduler has notified its nodes of their end.
    managers
        The manager of each node that was ever ready, by host name.
    """

    job_id: str
    request: BlockRequest
    until_s: float | None = None
    greeted: set[str] = field(default_factory=set)
    answering: set[str] = field(default_factory=set)
    nodes: dict[str, str] = field(default_factory=dict)
    unusable: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    noticed: bool = False
    managers: dict[str, str] = field(default_factory=dict)

    def complete(self) -> bool:
        return len(self.nodes) + len(self.unusable) >= self.request.nodes

"""What the benchmark asks of a system."""

from typing import Protocol

from tests.benchmarks.versus.machine import Machine


class System(Protocol):
    """A system that trains on nodes that come and go.

    Attributes
    ----------
    name
        As in the tables.
    needs
        The module that .venv-versus must have; empty: nothing beyond torch.
    blocks
        Whether one allocation of the scheduler may have several nodes, and outlive one of them.
    """

    name: str
    needs: str
    blocks: bool

    def start(self, machine: Machine, nodes: list[str]) -> None:
        """Begin the training on these nodes."""

    def join(self, machine: Machine, node: str) -> None:
        """A node has come."""

    def leave(self, machine: Machine, node: str) -> None:
        """The scheduler knows that a node is gone; its processes are killed next."""

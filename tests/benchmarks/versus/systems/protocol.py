"""What the benchmark asks of a system."""

from tests.benchmarks.versus.machine import Machine


class System:
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

    name = ''
    needs = ''
    blocks = False

    def start(self, machine: Machine, nodes: list[str]) -> None:
        """Begin the training on these nodes."""
        for node in nodes:
            self.join(machine, node)

    def join(self, machine: Machine, node: str) -> None:
        """A node has come: a file has its name, unless the system is told otherwise."""
        (machine.folder / 'nodes').mkdir(exist_ok=True)
        (machine.folder / 'nodes' / node).touch()

    def leave(self, machine: Machine, node: str) -> None:
        """The scheduler knows that a node is gone; its processes are killed next."""
        (machine.folder / 'nodes' / node).unlink(missing_ok=True)

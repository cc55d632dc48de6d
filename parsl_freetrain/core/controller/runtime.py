"""The port through which the controller's actions have effects, in a live run and in a replay."""

from collections.abc import Callable, Sequence
from typing import Protocol

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest


class Runtime(Protocol):
    """What can be done to a machine. ``at``: the time of the decision."""

    def open(self, request: BlockRequest, at: float) -> None: ...

    def close(self, blocks: Sequence[ev.CloseBlock], at: float) -> None:
        """Give blocks back, all at once."""

    def release(self, nodes: ev.ReleaseNodes, at: float) -> None:
        """Give some nodes of a block back."""

    def launch(self, fragment: ev.StartFragment, at: float) -> None: ...

    def send(self, stop: ev.StopFragment, at: float) -> None:
        """Tell a fragment to save a checkpoint at its next step boundary and stop."""

    def kill(self, fragment: ev.AbandonFragment, at: float) -> None: ...


def carry_out(
    runtime: Runtime,
    actions: Sequence[ev.Action],
    at: float,
    guarded: Callable[..., None] = lambda step, *arguments: step(*arguments),
) -> None:
    """Carry out a reply; ``guarded`` calls a function, and in a live run survives its failure."""
    for action in actions:
        match action:
            case ev.OpenBlock(request):
                guarded(runtime.open, request, at)
            case ev.ReleaseNodes():
                guarded(runtime.release, action, at)
            case ev.StartFragment():
                guarded(runtime.launch, action, at)
            case ev.StopFragment():
                guarded(runtime.send, action, at)
            case ev.AbandonFragment():
                guarded(runtime.kill, action, at)
            case ev.CloseBlock() | ev.EndTrainer():
                pass  # blocks follow below; who follows the events settles trainers
    if closing := [action for action in actions if isinstance(action, ev.CloseBlock)]:
        guarded(runtime.close, closing, at)

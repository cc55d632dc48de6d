"""The controller's actions in words."""

from __future__ import annotations

from parsl_freetrain.core.model import events as ev


def describe(action: ev.Action) -> str:
    """An action in a few words."""
    match action:
        case ev.OpenBlock(request):
            on_class = f' on {request.node_class}' if request.node_class else ''
            return f'open a block of {request.nodes} nodes{on_class}'
        case ev.CloseBlock(block, why):
            return f'close block {block}: {why}'
        case ev.ReleaseNodes(block, nodes, why):
            return f'give {len(nodes)} nodes of block {block} back: {why}'
        case ev.StartFragment(trainer, fragment, nodes):
            return f'start fragment {fragment} of {trainer!r} on {len(nodes)} nodes'
        case ev.StopFragment(trainer, fragment, why):
            return f'stop fragment {fragment} of {trainer!r}: {why}'
        case ev.AbandonFragment(trainer, fragment):
            return f'abandon fragment {fragment} of {trainer!r}: some of its nodes are gone'
        case ev.EndTrainer(trainer, state, why):
            return f'end {trainer!r}: {state}{f", {why}" if why else ""}'

"""The Parsl part: the executor, its interchange, and the channel to the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parsl_freetrain.executor.executor import FreeTrainExecutor

__all__ = ['FreeTrainExecutor']


def __getattr__(name: str) -> Any:
    """Import the executor on first access: nodes import parts of this package, not a solver."""
    if name == 'FreeTrainExecutor':
        from parsl_freetrain.executor.executor import FreeTrainExecutor

        return FreeTrainExecutor
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

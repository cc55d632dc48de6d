"""Calls of ``backward()`` in this process."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from parsl_freetrain.training.checkpoint.local_shard import local, real

calls = 0
looking: Callable[[Any], None] | None = None  # is given what the next call is for
losses: list[torch.Tensor] | None = None  # where each call's is noted
around: dict[str, Callable[[], Callable[[], None]]] = {}
"""By whose they are: called before it; what they return, after it."""


def forget(own: object) -> None:
    """A body is over: nobody looks at what is passed or left by its ``own`` calls."""
    global looking
    if around.get('gradients') == own:  # there is no other training since
        looking = None
        around.pop('gradients', None)


def watch() -> None:
    """All ways to it go through torch's caller of the engine, also names imported before."""
    autograd: Any = torch.autograd
    plain = autograd._engine_run_backward
    if hasattr(plain, '__wrapped__'):
        return

    @wraps(plain)
    def run(tensors: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        global calls
        kwargs['accumulate_grad'] = accumulate_grad
        # A part may be computed again within another call.
        if not accumulate_grad or torch._C._current_graph_task_id() != -1:
            return plain(tensors, *args, **kwargs)
        calls += 1
        if looking is not None:
            looking(tensors[0] if len(tensors) == 1 else tensors)
        if losses is not None:
            losses.extend(real(local(t.detach())).sum(dtype=torch.float32) for t in tensors)
        after = [before() for before in tuple(around.values())]
        try:
            return plain(tensors, *args, **kwargs)
        finally:
            for each in after:
                each()

    autograd._engine_run_backward = run

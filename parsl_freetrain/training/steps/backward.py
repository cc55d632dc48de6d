"""Calls of ``backward()`` in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

calls = 0
looking: Callable[[Any], None] | None = None
"""Is given what the next call is for."""
around: list[Callable[[], Callable[[], None]]] = []
"""Called before it; what they return, after it."""


def watch() -> None:
    plain = torch.autograd.backward
    if hasattr(plain, '__wrapped__'):
        return

    @wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        global calls
        if torch._C._current_graph_task_id() != -1:  # a part is computed again within another call
            return plain(tensors, *args, **kwargs)
        calls += 1
        if looking is not None:
            looking(tensors)
        after = [before() for before in around]
        plain(tensors, *args, **kwargs)
        for each in after:
            each()

    torch.autograd.backward = backward

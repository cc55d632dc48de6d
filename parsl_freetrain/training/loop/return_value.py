"""What the user's function returns, as plain values."""

from __future__ import annotations

import json
from typing import Any

from parsl_freetrain.core.model.errors import BadInput


def plain_text(value: object) -> str:
    """A value as JSON; empty for None. Tensors and arrays of one number count as numbers. Raises
    BadInput if it is none that JSON knows.
    """
    try:
        return '' if value is None else json.dumps(value, default=_number)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f'The function returned a {type(value).__name__} that cannot be kept as the result of '
            f'the training ({error}): return numbers, texts, and lists and dicts of them; the '
            'trained models are in the checkpoint.'
        ) from error


def _number(value: Any) -> Any:
    if hasattr(value, 'item') and getattr(value, 'ndim', 0) == 0:
        return value.item()
    raise TypeError(f'it has a {type(value).__name__} in it')

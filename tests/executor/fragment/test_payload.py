"""A user's function on its way to the nodes."""

from __future__ import annotations

import cloudpickle
import torch

from parsl_freetrain.executor.fragment.payload import pack


def tunes() -> bool:
    return bool(torch.backends.cudnn.benchmark)


def test_a_function_may_use_modules_that_are_of_their_own_class() -> None:
    function, _, _ = cloudpickle.loads(pack(tunes, (), {}, 'cnn').payload)
    assert function is not tunes  # sent by value
    assert function() is False

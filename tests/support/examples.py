"""Scripts of the documentation with the frameworks they are written for, in fragments."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch

from parsl_freetrain import BadInput, Checkpoint, FragmentContext, Reproducible, freetrain_app

EXAMPLES = Path(__file__).resolve().parents[2] / 'docs' / 'examples'


def example(name: str) -> ModuleType:
    """A script of docs/examples as a module, which ranks get by value."""
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def in_this_process(function: Callable[..., Any], **options: Any) -> tuple[Checkpoint, Any]:
    """Train undisturbed on one rank; the checkpoint and the first model's state."""
    kept: list[Any] = []

    def train(ctx: FragmentContext) -> Any:
        kept.append(ctx)
        return function(ctx)

    mode = Reproducible(shards=options.pop('shards', 4), seed=7)
    checkpoint = freetrain_app(**{'mode': mode, **options})(train).debug()
    assert kept[0]._run.model is not None
    return checkpoint, kept[0]._run.model.prepared.models[0].state_dict()


def refused_here(function: Callable[..., Any], **options: Any) -> str:
    """The sentence by which a function is refused on one rank, in this process."""
    with pytest.raises(BadInput) as refused:
        in_this_process(function, **options)
    assert '\n' not in str(refused.value)
    return str(refused.value)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

"""A trial of optimizers of other packages: small copies take steps; one is saved and restored."""

import copy
import io
import random
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint import state as st
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of

_OF_A_KIND, _STEPS = 2, 2
_LARGEST = {0: 1, 1: 64, 2: 64}  # along each axis, by their number; otherwise 8


def try_optimizers(prepared: Prepared) -> None:
    """Raises BadInput if one would not go on from a checkpoint; some cannot be tried."""
    for optimizer in prepared.optimizers:
        # One with a state takes all of its parameters, with their shapes: it has begun.
        if not type(optimizer).__module__.startswith('torch.') and not optimizer.state:
            with _unnoticed(optimizer), warnings.catch_warnings():
                warnings.simplefilter('ignore')
                _try(optimizer)


def _try(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    for closed in (False, True):
        train = partial(_train, closed=closed)
        with suppress(Exception):
            whole, again, cut = (_small(optimizer) for _ in range(3))
            content = copy.deepcopy(st.content_of(train(again, 0)))
            expected = [_bits(train(one, 1)) for one in (train(whole, 0), again)]
            break
    else:
        return
    try:
        state, file = st.collect(content, st.Position(0, 0, 0, 0, 0, 0)), io.BytesIO()
        torch.save(state.structure, file)
        file.seek(0)
        saved = st.State(state.tensors, torch.load(file, weights_only=True))
        st.restore(cut, st.assemble('of a trial', saved))
        found = _bits(train(cut, 1))
    except Exception as error:
        raise BadInput(
            f'{name} cannot be saved and loaded again ({error.__cause__ or error}): use another '
            'optimizer, or a version of it that loads its own state_dict().'
        ) from error
    if expected[0] == expected[1] != found:
        raise BadInput(
            f'{name} does not go on as before from its own state_dict(), so that a cut would '
            'change the training: use another optimizer, or keep all that it remembers in its '
            'state_dict().'
        )


def _small(optimizer: torch.optim.Optimizer) -> Prepared:
    memo: dict[int, Any] = {}
    torch.manual_seed(0)
    for parameter in parameters_of(optimizer):
        most = _LARGEST.get(parameter.ndim, 8)
        real = parameter.dtype.is_floating_point or parameter.dtype.is_complex
        how: Any = {'dtype': parameter.dtype if real else torch.float32}
        tensor = torch.randn([min(n, most) for n in parameter.shape], **how)
        small = torch.nn.Parameter(tensor.to(parameter.device), parameter.requires_grad)
        small.__dict__.update(vars(parameter))
        memo[id(parameter)] = small
    copied = _copied(optimizer, memo)
    for group in copied.param_groups:
        numbers = [p.ndim for p in group['params']]
        few = [p for i, p in enumerate(group['params']) if numbers[:i].count(p.ndim) < _OF_A_KIND]
        group['params'][:] = few
    return Prepared((torch.nn.ParameterList(parameters_of(copied)),), (copied,))


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> Any:
    """With all attributes, which torch's own copies lack, and without what others have added."""
    new: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = new
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            _copied(value, memo)
        if name != 'step':  # a scheduler's, which would step the optimizer itself
            vars(new)[name] = OrderedDict() if 'hooks' in name else copy.deepcopy(value, memo)
    return new


def _train(prepared: Prepared, begin: int, *, closed: bool) -> Prepared:
    """``closed``: it computes the loss several times in a step."""

    def gradients() -> torch.Tensor:
        for parameter in prepared.models[0].parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        return torch.zeros(())

    for number in range(begin * _STEPS, (begin + 1) * _STEPS):
        torch.manual_seed(number)
        gradients()
        prepared.optimizers[0].step(*([gradients] if closed else ()))
    return prepared


def _bits(prepared: Prepared) -> list[bytes]:
    every = prepared.models[0].parameters()
    return [p.detach().cpu().view(-1).view(torch.uint8).numpy().tobytes() for p in every]


@contextmanager
def _unnoticed(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Random numbers stay as they are, and nothing is compiled for a few small steps."""
    numbers, states, compiler = np.random.get_state(), random.getstate(), torch.compile
    devices = {p.device for p in parameters_of(optimizer) if p.device.type == 'cuda'}
    torch.compile = lambda function=None, **_: function or (lambda same: same)  # type: ignore
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.compile = compiler
        np.random.set_state(numbers)
        random.setstate(states)

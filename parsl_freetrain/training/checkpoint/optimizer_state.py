"""Optimizers' states: loaded, moved, and named by parameters to fit models divided otherwise."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import divided_like, local
from parsl_freetrain.training.checkpoint.trainables import Prepared

_WITHIN = 'of its optimizer '


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its ``state_dict()``, and what that lacks of the optimizers in its attributes (SAM)."""
    own = optimizer.state_dict()
    known = set(map(id, tree_leaves(own)))
    for name, one in _within(optimizer).items():
        theirs = one.state_dict()
        if any(isinstance(t, torch.Tensor) and id(t) not in known for t in tree_leaves(theirs)):
            own = {**own, _WITHIN + name: theirs}
    return own


def _within(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    every = vars(optimizer).items()
    return {name: one for name, one in every if isinstance(one, torch.optim.Optimizer)}


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any], *, keep_types: bool) -> None:
    """Set an optimizer to a ``state_dict()``; tensors get their parameter's memory layout, as fused
    kernels need. ``keep_types``: no cast, which would round float32 for a bfloat16 parameter.
    """
    within = _within(optimizer)
    shared = [one for one in within.values() if one.param_groups is optimizer.param_groups]
    for name, one in within.items():
        if _WITHIN + name in state:
            load(one, state[_WITHIN + name], keep_types=keep_types)
    optimizer.load_state_dict({k: v for k, v in state.items() if k.removeprefix(_WITHIN) == k})
    for one in shared:
        one.param_groups = optimizer.param_groups
    if not {'state', 'param_groups'} <= state.keys():  # a form of its own, of another optimizer
        return
    numbers = [number for group in state['param_groups'] for number in group['params']]
    for number, parameter in zip(numbers, every_parameter(optimizer), strict=True):
        loaded, saved = optimizer.state.get(parameter), state['state'].get(number)
        if isinstance(loaded, dict) and isinstance(saved, dict):
            # torch does not cast the step, and decides on its device.
            others = {key: value for key, value in loaded.items() if key != 'step'}
            optimizer.state[parameter] = {**loaded, **_placed(others, saved, parameter, keep_types)}


def move_to_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the state to the parameters' devices; Adagrad makes it where they are at first."""
    for group in optimizer.param_groups:
        steps_too = group.get('fused') or group.get('capturable')
        for parameter in group['params']:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (key != 'step' or steps_too):
                    state[key] = value.to(parameter.device)


def every_parameter(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group['params'])


def _placed(loaded: Any, saved: Any, parameter: torch.Tensor, keep_types: bool) -> Any:
    if isinstance(loaded, Mapping) and isinstance(saved, Mapping):
        return {k: _placed(v, saved.get(k), parameter, keep_types) for k, v in loaded.items()}
    if isinstance(loaded, list) and isinstance(saved, list) and len(loaded) == len(saved):
        return [_placed(*both, parameter, keep_types) for both in zip(loaded, saved, strict=True)]
    if not isinstance(loaded, torch.Tensor):
        return loaded
    if keep_types and isinstance(saved, torch.Tensor) and saved.shape == loaded.shape:
        loaded = saved.to(loaded.device)
    own, kept = local(parameter), local(loaded)
    if kept.dim() < 3 and not kept.is_contiguous():
        return loaded
    if kept.shape == own.shape and kept.stride() != own.stride():
        laid = torch.empty_like(own, dtype=kept.dtype, device=kept.device).copy_(kept)
        return divided_like(laid, loaded)
    return loaded


def parameter_names(prepared: Prepared) -> dict[int, str]:
    """Names by ``id`` of the parameter, such as '1.layers.3.weight'."""
    return {id(parameter): name for name, parameter in prepared.named_parameters()}


def group_names(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[list[str]]:
    return [[_name(p, names) for p in group['params']] for group in optimizer.param_groups]


def orders(prepared: Prepared) -> list[list[list[str]]]:
    """The parameters' names in each group of each optimizer."""
    names = parameter_names(prepared)
    return [group_names(optimizer, names) for optimizer in prepared.optimizers]


def put_in_order(optimizer: Any, then: list[list[str]], prepared: Prepared) -> list[list[str]]:
    """Give groups the order that they had: a set's is another in each process. Names by group."""
    now = group_names(optimizer, parameter_names(prepared))
    for group, own, wanted in zip(optimizer.param_groups, now, then, strict=False):
        if own != wanted and set(own) == set(wanted):
            for key in {'params', 'param_names'} & group.keys():
                by_name = dict(zip(own, group[key], strict=True))
                group[key][:] = [by_name[name] for name in wanted]
            own[:] = wanted
    return now


def add_groups(optimizer: torch.optim.Optimizer, then: list[list[str]], prepared: Prepared) -> None:
    """Add groups that were added after ``ctx.prepare``; adding them again is nothing then."""
    now = put_in_order(optimizer, then, prepared)
    if len(then) <= len(now) or then[: len(now)] != now:
        return
    parameters, plain = dict(prepared.named_parameters()), optimizer.add_param_group
    added = [[parameters[name] for name in names] for names in then[len(now) :]]
    for tensors in added:
        plain({'params': tensors})
    known = [set(map(id, tensors)) for tensors in added]

    def add(group: dict[str, Any]) -> None:
        given = group['params']
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        if set(map(id, given)) in known:
            known.remove(set(map(id, given)))
        else:
            plain({**group, 'params': given})

    optimizer.add_param_group = add  # type: ignore[method-assign, assignment]


def by_name(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: dict[int, str]
) -> dict[str, Any]:
    """A ``state_dict()`` with parameters' names for numbers; ValueError if one has none."""
    called = [_name(parameter, names) for parameter in every_parameter(optimizer)]
    return {
        **state,
        'state': {called[number]: kept for number, kept in state['state'].items()},
        'param_groups': [
            {**group, 'params': dict.fromkeys(called[number] for number in group['params'])}
            for group in state['param_groups']
        ],
    }


def by_number(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> dict[str, Any]:
    """The part of :func:`by_name`'s state for these parameters; ValueError if it lacks any.
    Another ``state_dict()`` stays as it is.
    """
    if not any(isinstance(group.get('params'), dict) for group in state.get('param_groups', ())):
        return state
    if len(state['param_groups']) != len(optimizer.param_groups):
        raise ValueError(
            f'{len(state["param_groups"])} groups of parameters there and '
            f'{len(optimizer.param_groups)} here'
        )
    kept: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for now, then in zip(optimizer.param_groups, state['param_groups'], strict=True):
        first = number
        for name in (_name(parameter, names) for parameter in now['params']):
            if name not in then['params']:
                raise ValueError(f'parameter {name} is missing or in another group there')
            if name in state['state']:
                kept[number] = state['state'][name]
            number += 1
        groups.append({**then, 'params': list(range(first, number))})
    return {**state, 'state': kept, 'param_groups': groups}


def _name(parameter: torch.Tensor, names: dict[int, str]) -> str:
    if id(parameter) not in names:
        raise of_no_model(parameter)
    return names[id(parameter)]


def of_no_model(parameter: torch.Tensor) -> BadInput:
    return BadInput(
        f'An optimizer has a parameter of shape {tuple(parameter.shape)} that belongs to no model '
        'of ctx.prepare. If a model replaces it in its pass (self.weight = nn.Parameter(...)), the '
        'optimizer, other ranks and checkpoints would go on with the old one: change its values '
        '(copy_) in ctx.after_step(fn), or make it a buffer.'
    )

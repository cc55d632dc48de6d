"""Where the body of a loop may change values by name: how they are got, and set."""

import copy
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch

from parsl_freetrain.training.loop import changes
from parsl_freetrain.training.loop.enumerated import number_of, set_number
from parsl_freetrain.training.loop.places import Place

NONE = object()  # what is not there
Values = Mapping[Any, Any]
Space = tuple[Callable[[], Values], Callable[[Values], object]]
"""Where there are values: what gives them by name, and what sets some."""


def ones_of(places: Sequence[Place], counts: Sequence[Any]) -> Space:
    named = {p.path: (p.holder, p.name) for p in places if isinstance(p.holder, dict)}
    ones: dict[str, Any] = {place.path: (place.value, place.put) for place in places}
    for i, one in enumerate(counts, 1):
        ones[f'enumerate {i}'] = partial(number_of, one), partial(set_number, one)
    others = {name: get for name, (get, _) in ones.items() if name not in named}

    def values() -> Values:
        found = {name: own[key] for name, (own, key) in named.items() if key in own}
        for name, get in others.items():
            try:  # as suppress(), which takes longer than the rest
                found[name] = get()
            except (KeyError, ValueError):  # it is gone
                continue
        return found

    def put_all(values: Values) -> None:
        for name in values.keys() & ones.keys():
            ones[name][1](values[name])

    return values, put_all


def set_in_modules(modules: Mapping[str, torch.nn.Module], names: AbstractSet[str]) -> Space:
    """Attributes that functions set: some are first there behind a forward pass."""

    def values() -> Values:
        both = ((path, vars(module)) for path, module in modules.items())
        return {f'{path}.{name}': own[name] for path, own in both for name in names & own.keys()}

    def put_all(values: Values) -> None:
        for path, value in values.items():
            of, _, name = path.rpartition('.')
            put(vars(modules[of]) if of in modules else {}, {name: value})

    return values, put_all


def of_metrics(metrics: Mapping[str, Any]) -> Space:
    """Copies of what metrics hold, which they change in place."""
    kept: dict[str, tuple[Any, dict[str, Any]]] = {}

    def copied(one: Any, within: bool = False) -> Any:
        if isinstance(one, torch.Tensor):
            return one if within else one.clone()
        if isinstance(one, dict):
            found = copy.copy(one)  # some have a default
            found.update((name, copied(value)) for name, value in one.items())
            return found
        return [copied(value, True) for value in one] if type(one) is list else one

    def looked_at(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return id(one), 0 if one.is_inference() else one._version
        if isinstance(one, dict):
            return [*map(looked_at, one.values())]
        return (len(one), looked_at(one[-1])) if isinstance(one, list) and one else one

    def values() -> Values:
        for path, one in metrics.items():
            its = changes.state_of(one)
            if path not in kept or kept[path][0] != looked_at(its):
                kept[path] = looked_at(its), {f'{path}.{k}': copied(v) for k, v in its.items()}
        return {name: value for _, its in kept.values() for name, value in its.items()}

    def put_all(values: Values) -> None:
        for name, value in values.items():
            path, _, key = name.rpartition('.')
            if path in metrics:
                changes.load_state(metrics[path], {key: copied(value)})
                kept[path][1][name] = value
        for path, (_, its) in kept.items():
            kept[path] = looked_at(changes.state_of(metrics[path])), its

    return values, put_all


def put(own: dict[str, Any], values: Values) -> None:
    for name, value in values.items():
        own.pop(name, None) if value is NONE else own.update({name: value})

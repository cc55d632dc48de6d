"""What ``state_dict()`` lacks: settings such as ``requires_grad``, and non-persistent buffers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of

_SCALARS = (bool, int, float, str, type(None))


class ModuleState:
    """Notices which settings and buffers change in training, which checkpoints hold by name."""

    def __init__(self, models: Sequence[torch.nn.Module], saved: Mapping[str, Any] | None) -> None:
        self._models, self._saved = models, saved or {}
        self._settings: dict[str, Any] | None = None
        self._buffers: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def put_back(self) -> None:
        settings, buffers = (self._saved.get(name, {}) for name in ('settings', 'buffers'))
        set_settings(self._models, settings)
        set_buffers(self._models, buffers)

    def go_back(self, saved: Mapping[str, Any]) -> None:
        """Training goes back to an earlier checkpoint, which holds ``saved``."""
        first = {path: value for path, (*_, value) in self._buffers.items()}
        every = {'settings': self._settings or {}, 'buffers': first}
        self._saved = {kind: {**its, **saved.get(kind, {})} for kind, its in every.items()}
        self.put_back()

    def begin(self, *, put_back: bool) -> None:
        """Call when training begins or goes on, once the function has made all its settings, which
        count where an epoch begins; else ``put_back``.
        """
        if self._settings is not None:
            return  # at a later loop the function's own settings between the loops count
        self._settings = settings_of(self._models)
        for path, module, key in _not_persistent(self._models):
            if (buffer := module._buffers[key]) is not None:
                self._buffers[path] = buffer, _version(buffer), buffer.detach().clone()
        if put_back:
            self.put_back()

    def changed(self) -> dict[str, Any]:
        buffers = {
            path: buffer.detach()
            for path, module, key in _not_persistent(self._models)
            if (buffer := module._buffers[key]) is not None
            and (path in self._saved.get('buffers', {}) or self._has_changed(path, buffer))
        }
        return {'settings': self.changed_settings(), 'buffers': buffers}

    def changed_settings(self) -> dict[str, Any]:
        then, now = self._settings or {}, settings_of(self._models)
        return {
            path: value
            for path, value in now.items()
            if path in self._saved.get('settings', {}) or then.get(path, value) != value
        }

    def _has_changed(self, path: str, now: torch.Tensor) -> bool:
        if path not in self._buffers:
            return True
        known, version, value = self._buffers[path]
        if now is known and _version(now) == version:
            return False
        # Reproducible mode writes to all buffers.
        return (now.shape, now.dtype) != (value.shape, value.dtype) or not torch.equal(now, value)


class Structure:
    """The names and shapes of all that is trained and saved, which must stay as they are."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._made = prepared, _shapes(prepared)

    def check(self) -> None:
        """Raises BadInput if something was added, removed or replaced by another shape."""
        now, made = _shapes(self._prepared), self._made
        if now != made:
            differences = [f'{name} is new' for name in now if name not in made]
            differences += [f'{name} is gone' for name in made if name not in now]
            differences += [
                f'{name} has shape {now[name]} and had {shape}'
                for name, shape in made.items()
                if now.get(name, shape) != shape
            ]
            raise BadInput(
                f'The models have other parameters or buffers than in ctx.prepare '
                f'({"; ".join(differences[:4])}), which the next fragment could not load: prune '
                '(prune.identity), parametrize and register all of them before ctx.prepare, make '
                'there what a first pass makes (ctx.warm_up), and change only values later.'
            )
        known = {id(parameter) for _, parameter in self._prepared.named_parameters()}
        for number, optimizer in enumerate(self._prepared.optimizers, 1):
            for parameter in parameters_of(optimizer):
                if id(parameter) not in known:
                    raise BadInput(
                        f'Optimizer {number} got a parameter of shape {tuple(parameter.shape)} '
                        'that is of no model of ctx.prepare: make all parameters before '
                        'ctx.prepare, and give it their models.'
                    )


def _settings(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any, str]]:
    """The name of each setting, and the object that has it as which attribute."""
    for number, model in enumerate(models, 1):
        for name, module in model.named_modules():
            where = f'{number}.{name}'
            for key, value in vars(module).items():
                if type(value) in _SCALARS and not key.startswith('_'):
                    yield f'{where}.{key}', module, key
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_leaf:
                    yield f'{where}.{key}.requires_grad', parameter, 'requires_grad'


def settings_of(models: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {path: getattr(owner, key) for path, owner, key in _settings(models)}


def set_settings(models: Sequence[torch.nn.Module], settings: Mapping[str, Any]) -> None:
    for path, owner, key in _settings(models):
        if path in settings and getattr(owner, key) != settings[path]:
            setattr(owner, key, settings[path])


def buffers_beside(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By path, those that are not in its state."""
    every = ((path, own._buffers[key]) for path, own, key in _not_persistent([module]))
    return {path: buffer for path, buffer in every if buffer is not None}


@torch.no_grad()
def set_buffers(models: Sequence[torch.nn.Module], buffers: Mapping[str, torch.Tensor]) -> None:
    for path, module, key in _not_persistent(models) if buffers else ():
        if path in buffers:
            now, then = module._buffers[key], buffers[path]
            if now is not None and (now.shape, now.dtype) == (then.shape, then.dtype):
                now.copy_(then)
            else:
                device = next(iter(module.parameters()), then).device
                module._buffers[key] = then.to(device if now is None else now.device)


def _not_persistent(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any, str]]:
    for number, model in enumerate(models, 1):
        for name, module in model.named_modules():
            for key in module._non_persistent_buffers_set:
                yield f'{number}.{name}.{key}', module, key


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _shapes(prepared: Prepared) -> dict[str, tuple[int, ...]]:
    found = {name: tuple(parameter.shape) for name, parameter in prepared.named_parameters()}
    for number, model in enumerate(prepared.models, 1):
        for name, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    found[f'{number}.{name}.{key}'.replace('..', '.')] = tuple(buffer.shape)
    return found

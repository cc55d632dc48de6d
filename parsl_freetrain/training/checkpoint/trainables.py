"""What ``ctx.prepare`` gets: models, optimizers, schedulers, gradient scalers, averaged models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from parsl_freetrain.core.model.errors import BadInput


class OwnParameters:
    """Parameters of optimizers that belong to no model, by names such as 'optimizer_1.0.2'."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """As a module's; raises ValueError if other parameters were saved."""
        own = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if own != (there := {name: tuple(tensor.shape) for name, tensor in state.items()}):
            raise ValueError(f'parameters of no model: {there} there and {own} here')
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])


@dataclass(frozen=True)
class Prepared:
    """What ``ctx.prepare`` got, by kind in order; ``averages``: of models; ``own``: at most one."""

    models: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scalers: tuple[torch.amp.GradScaler, ...] = ()
    averages: tuple[torch.nn.Module, ...] = ()
    own: tuple[OwnParameters, ...] = ()

    def tensors(self) -> list[torch.Tensor]:
        return [
            tensor for model in self.models for tensor in (*model.parameters(), *model.buffers())
        ] + [tensor for own in self.own for tensor in own.tensors.values()]

    @property
    def scales(self) -> bool:
        return any(scaler.is_enabled() for scaler in self.scalers)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters; names such as '1.layers.3.weight' begin with the number of the model."""
        for number, model in enumerate(self.models, 1):
            yield from ((f'{number}.{name}', one) for name, one in model.named_parameters())
        for own in self.own:
            yield from own.tensors.items()

    def called(self, models: str = 'models') -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of models, or of ``averages``, by names for a sentence."""
        several = getattr(self, models)
        for number, model in enumerate(several, 1):
            of = f' of {models[:-1]} {number}' if models != 'models' or len(several) > 1 else ''
            yield from ((f'{name!r}{of}', one) for name, one in model.named_parameters())
        for own in self.own if models == 'models' else ():
            yield from ((f'{name} of no model', one) for name, one in own.tensors.items())


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups of an optimizer, each once."""
    return list({id(p): p for group in optimizer.param_groups for p in group['params']}.values())


def sort_out(things: tuple[Any, ...], *, named: bool = False) -> Prepared:
    """Sort by kind what ``ctx.prepare`` got; ``named``: parameters must belong to a model."""
    sorted_out: dict[str, list[Any]] = {name: [] for name in Prepared.__dataclass_fields__}
    for thing in things:
        sorted_out[_kind_of(thing)].append(thing)
    models, optimizers = sorted_out['models'], sorted_out['optimizers']
    if not optimizers:
        raise BadInput('ctx.prepare was given no torch.optim.Optimizer: give it one.')
    for model in models:
        if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
            raise BadInput(
                f'ctx.prepare was given a {type(model).__name__} that has parameters that are made '
                'in its first forward pass: say ctx.warm_up(lambda: model(sample)) before its '
                'optimizer is made.'
            )
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if type(one) in (torch.Tensor, torch.nn.Parameter) and 'float8' in str(one.dtype):
                raise BadInput(
                    f'ctx.prepare was given a {type(model).__name__} whose {name!r} is '
                    f'{one.dtype}, in which torch cannot add: keep it in bfloat16 or float32, and '
                    'convert it where it is used.'
                )
    known = {id(parameter) for model in models for parameter in model.parameters()}
    strange = {
        id(p): (f'optimizer_{number}.{place}.{i}', p)
        for number, optimizer in reversed([*enumerate(optimizers, 1)])
        for place, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group['params'])
        if id(p) not in known
    }
    own = dict(strange.values())
    if named and own:
        raise BadInput(
            'ctx.prepare was given an optimizer with a parameter of shape '
            f'{tuple(min(own.items())[1].shape)} that is of none of the '
            'models: give it that model too, since trainers with shapes keep states of '
            'optimizers by the names of parameters in models.'
        )
    if own:
        sorted_out['own'] = [OwnParameters(own)]
    return Prepared(**{name: tuple(of_kind) for name, of_kind in sorted_out.items()})


def _kind_of(thing: Any) -> str:
    if isinstance(thing, DistributedDataParallel):
        raise BadInput(
            'ctx.prepare was given a model that is wrapped in DistributedDataParallel already, '
            'so its gradients would be averaged twice: give it the model itself '
            f'(a {type(thing.module).__name__}).'
        )
    if type(thing).__module__.startswith('accelerate.'):
        raise BadInput(
            f'ctx.prepare was given an {type(thing).__name__} of accelerate: leave out '
            'accelerator.prepare, and give ctx.prepare what was given to it.'
        )
    for kind, field in (
        (AveragedModel, 'averages'),
        (torch.nn.Module, 'models'),
        (torch.optim.Optimizer, 'optimizers'),
        (torch.amp.GradScaler, 'scalers'),
    ):
        if isinstance(thing, kind):
            return field
    if all(hasattr(thing, name) for name in ('step', 'state_dict', 'load_state_dict')):
        return 'schedulers'
    raise BadInput(
        f'ctx.prepare was given a {type(thing).__name__}; it takes models, optimizers, '
        'learning rate schedulers, gradient scalers and averaged models.'
    )


def check_schedulers(prepared: Prepared) -> None:
    """Refuse (BadInput) a scheduler that an optimizer has and ``ctx.prepare`` was not given."""
    known = {id(getattr(scheduler, 'optimizer', None)) for scheduler in prepared.schedulers}
    for optimizer in prepared.optimizers:
        # torch's schedulers mark the step method of their optimizer.
        if hasattr(optimizer.step, '_wrapped_by_lr_sched') and id(optimizer) not in known:
            raise BadInput(
                'A learning rate scheduler was made for an optimizer but not given to ctx.prepare, '
                'so its state would be lost between fragments: give it to ctx.prepare.'
            )

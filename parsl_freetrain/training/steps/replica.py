"""A model on several ranks in throughput mode, and the mean of gradients that
DistributedDataParallel does not see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of
from parsl_freetrain.training.steps.accumulation import weigh
from parsl_freetrain.training.steps.buffers import Buffers


class Replica(DistributedDataParallel):
    """Has the methods, items and names of the model itself, so that a script is the same for any
    number of ranks. ``trained``: the parameters whose gradients DistributedDataParallel averages.

    It does so only for passes through ``forward``, and all of these parameters must take part.
    Where that may not hold (a method of the model was used, a parameter was frozen), gradients are
    averaged when optimizers step, from then on: ``at_steps``.
    """

    at_steps = False

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        # DDP cannot exchange buffers that are sparse, or have grown on one rank.
        module._ddp_params_and_buffers_to_ignore = [  # type: ignore[assignment]
            f'{name}.{key}' if name else key
            for name, inner in module.named_modules()
            for key in inner._buffers
        ]
        super().__init__(module, **options)
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def average_at_steps(self) -> None:
        """Call on all ranks at the same point of the training."""
        if not self.at_steps:
            self.at_steps = True
            self.reducer._remove_autograd_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.module if self.at_steps else super().forward)(*args, **kwargs)

    state_dict: Any = property(lambda self: self.module.state_dict)
    load_state_dict: Any = property(lambda self: self.module.load_state_dict)
    named_parameters: Any = property(lambda self: self.module.named_parameters)
    named_buffers: Any = property(lambda self: self.module.named_buffers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == 'module':
                raise
        found = getattr(self.module, name)
        if callable(found):
            self.average_at_steps()
        return found

    def __iter__(self) -> Iterator[Any]:
        self.average_at_steps()
        return iter(self.module)

    def __getitem__(self, key: Any) -> Any:
        self.average_at_steps()
        return self.module[key]

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        copied: torch.nn.Module = copy.deepcopy(self.module, memo)
        return copied  # which is not trained


def with_shared_parts(models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The models that have a parameter of another one: DistributedDataParallel would wait for all
    of them in every pass.
    """
    own = [set(map(id, model.parameters())) for model in models]
    others = [[o for j, o in enumerate(own) if j != i] for i in range(len(own))]
    return [model for i, model in enumerate(models) if any(own[i] & o for o in others[i])]


class MeanAtSteps:
    """Averages gradients when optimizers step, where no :class:`Replica` does it in the backward
    pass: of parameters of no model, of those that were unfrozen or added later or belong to several
    models, and of models that are used otherwise. In optimizers that compute the loss several times
    in a step, the loss is averaged too, since they decide by it.

    Parameters
    ----------
    combine
        Adds up weighted gradients of all ranks, in place.
    weights
        This rank's weight of its gradients and of its loss; None: nothing is averaged now.
    """

    def __init__(
        self,
        prepared: Prepared,
        models: Sequence[torch.nn.Module],
        buffers: Buffers,
        group: ProcessGroup | None,
        combine: Callable[[Sequence[torch.nn.Parameter]], None],
        weights: Callable[[], tuple[float, float] | None],
    ) -> None:
        self.replicas = [model for model in models if isinstance(model, Replica)]
        self._buffers = buffers
        self._group, self._combine, self._weights = group, combine, weights
        self._scaled = prepared.scales
        self._known: tuple[Any, ...] = ()
        self._of: dict[int, list[torch.nn.Parameter]] = {}
        self._optimizers = prepared.optimizers
        for optimizer in prepared.optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def begin(self) -> None:
        """Call before the micro-batches of a global batch, on all ranks."""
        for replica in self.replicas:
            if not (replica.at_steps or all(p.requires_grad for p in replica.trained)):
                replica.average_at_steps()
        self._buffers.share(self._group)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._average(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get('closure')
        if closure is None:
            return None

        def averaged() -> Any:
            loss = closure()
            self._average(optimizer)
            return loss if loss is None else self._mean(loss)

        return (args[0], averaged, *args[2:]), {k: v for k, v in kwargs.items() if k != 'closure'}

    @torch.no_grad()
    def _average(self, optimizer: torch.optim.Optimizer) -> None:
        rest, weights = self._rest(optimizer), self._weights()
        if not rest or weights is None:
            return
        if self._scaled:
            raise BadInput(
                'ctx.prepare was given a gradient scaler, which cannot be used on several ranks '
                'with parameters that belong to no model or to several, were unfrozen later, or '
                'are used by other methods than forward: use bfloat16, which needs no scaler.'
            )
        for parameter in rest:
            if parameter.grad is not None:
                weigh(parameter.grad, weights[0])
        self._combine(rest)

    def _rest(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """What is averaged here; the same on all ranks."""
        groups = [len(g['params']) for one in self._optimizers for g in one.param_groups]
        known = *groups, *(replica.at_steps for replica in self.replicas)
        if known != self._known:
            trained = [one.trained for one in self.replicas if not one.at_steps]
            by_passes = {id(p) for own in trained for p in own}
            self._known = known
            self._of = {
                id(one): [p for p in parameters_of(one) if id(p) not in by_passes]
                for one in self._optimizers
            }
        return self._of[id(optimizer)]

    def _mean(self, loss: Any) -> torch.Tensor:
        mean = torch.as_tensor(loss).detach().clone()
        weights = self._weights()
        if weights is not None:
            weigh(mean, weights[1])
            dist.all_reduce(mean, group=self._group)
        return mean

"""A model on several ranks in throughput mode, and the gradients that DDP does not see."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.optimizer_state import of_no_model
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of
from parsl_freetrain.training.steps import backward
from parsl_freetrain.training.steps.accumulation import weigh
from parsl_freetrain.training.steps.buffers import Buffers
from parsl_freetrain.training.steps.gradient_guard import CHANGED, OFFER


class Replica:
    """A model whose passes go through DistributedDataParallel, with a class of its own, as FSDP
    does it, so that a script is the same for any number of ranks. ``trained``: the parameters that
    it averages; where they may not all take part, gradients are averaged when optimizers step:
    ``at_steps``.
    """

    at_steps = in_pass = False
    waits = False  # for the backward pass of a forward pass
    partly = False  # in this batch gradients came by other ways, after its mean was taken or never

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        # DDP cannot exchange buffers that are sparse, or have grown on one rank.
        model._ddp_params_and_buffers_to_ignore = [  # type: ignore[assignment]
            name for name, _ in model.named_buffers(remove_duplicate=False)
        ]
        self.ddp = DistributedDataParallel(model, **options)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        object.__setattr__(model, '__class__', _passing(type(model), self))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.in_pass = self.waits = True
        try:
            return self.ddp(*args, **kwargs)
        finally:
            self.in_pass = False

    def gradients(self) -> int:
        """Another number where gradients were added up."""
        found = [parameter.grad for parameter in self.trained]
        return sum(1 + one._version for one in found if one is not None)

    def check(self) -> None:
        """Raises BadInput if a mean of gradients was begun that cannot be ended."""
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            own = {*map(id, self.ddp.module.parameters())}
            for one in self.trained:
                if id(one) not in own:
                    raise of_no_model(one) from None
            name = type(self.ddp.module).__name__
            raise BadInput(
                f'The last backward() did not reach all parameters of {name}, for which the ranks '
                'wait: tell ctx.prepare find_unused_parameters=True; or, if the model was called '
                'only to look at what it says and a part of it was trained, call it within '
                'torch.no_grad() there.'
            ) from None


def _passing(plain: Any, by: Replica) -> Any:
    """The class of a model whose passes go through a replica; a copy is a plain model again."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        direct = by.at_steps or by.in_pass or by.ddp.module is not self
        if direct or not torch.is_grad_enabled():
            return plain.__call__(self, *args, **kwargs)
        return by.run(*args, **kwargs)

    def reduce(self: Any, _: Any) -> Any:
        # With later protocols, pickle demands the class that is here.
        function, args, *rest = plain.__reduce_ex__(self, 1)
        made = [plain if one is own else one for one in (function, *args)]
        return made[0], tuple(made[1:]), *rest

    names = {name: getattr(plain, name) for name in ('__module__', '__qualname__', '__doc__')}
    of_its_own = {'__call__': call, '__reduce_ex__': reduce, '_replica': by}
    own = type(plain)(plain.__name__, (plain,), {**names, **of_its_own})
    return own


def is_replica(model: torch.nn.Module) -> bool:
    return hasattr(type(model), '_replica')


def with_shared_parts(models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Models with another's parameter, for all of which DDP would wait."""
    own = [set(map(id, model.parameters())) for model in models]
    others = [[o for j, o in enumerate(own) if j != i] for i in range(len(own))]
    return [model for i, model in enumerate(models) if any(own[i] & o for o in others[i])]


_Rest = tuple[list[torch.nn.Parameter], set[Replica]]
_OWN = (
    'On several ranks it is the gradient of a rank there, averaged in optimizer.step(), if the '
    'parameter belongs to no model or several or was unfrozen later, if its model is not called '
    'itself (model.encode), or if one pass has two backward()'
)


class MeanAtSteps:
    """Averages gradients when optimizers step, where no :class:`Replica` does it in the backward
    pass: of parameters of no model, unfrozen or added later, or of several models, and of models
    used otherwise; and the loss, where optimizers compute it several times. ``combine`` adds up all
    ranks' weighted gradients. ``weights``: of gradients, of the loss, and as
    DistributedDataParallel needs them; None: nothing is averaged now.
    """

    def __init__(
        self,
        prepared: Prepared,
        replicas: Sequence[Replica],
        buffers: Buffers,
        group: ProcessGroup | None,
        combine: Callable[[Sequence[torch.nn.Parameter]], None],
        weights: Callable[[], tuple[float, float, float] | None],
    ) -> None:
        self.replicas = replicas
        self._buffers = buffers
        self._group, self._combine, self._weights = group, combine, weights
        self._known: tuple[Any, ...] = ()
        self._of: dict[int, _Rest] = {}
        self._left: dict[int, tuple[int, int]] = {}  # identities and versions of gradients
        self._optimizers = prepared.optimizers
        for optimizer in prepared.optimizers:
            optimizer.register_step_pre_hook(self._before_step)
        backward.around['replicas'] = self._backward
        backward.watch()

    def begin(self) -> None:
        """Call before the micro-batches of a global batch, on all ranks."""
        for replica in self.replicas:
            replica.check()
            replica.partly = replica.waits = False
            if not (replica.at_steps or all(p.requires_grad for p in replica.trained)):
                replica.at_steps = True
                replica.ddp.reducer._remove_autograd_hooks()
        self._buffers.share(self._group)

    def _backward(self) -> Callable[[], None]:
        """Notice whose gradients DDP misses: parts, weights, a second backward pass."""
        several = len(self.replicas) > 1
        seen = [(one, one.gradients() if several or not one.waits else -1) for one in self.replicas]

        def after() -> None:
            for one, before in seen:
                if before == -1 or one.gradients() != before:
                    one.partly, one.waits = one.partly or not one.waits, False
            self._note()

        return after

    def _note(self) -> None:
        """Remember gradients that are averaged later: what is not linear in them would differ."""
        waiting = [p for one in self._optimizers for p in self.rest(one)[0]]
        self._left = {id(p): _mark(p.grad) for p in waiting if p.grad is not None}

    def unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """A gradient scaler has unscaled gradients: whether they are averaged later."""
        self._note()
        return bool(self.rest(optimizer)[0])

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
        (rest, replicas), weights = self.rest(optimizer), self._weights()
        for replica in replicas:
            replica.check()
        if not rest or weights is None:
            return
        for parameter in rest:
            left = self._left.pop(id(parameter), None)
            if left is not None and parameter.grad is not None and left != _mark(parameter.grad):
                raise BadInput(f'{CHANGED}. {_OWN}: {OFFER}')
        weighted = {id(p) for one in self.replicas if not one.at_steps for p in one.trained}
        # A mean that DistributedDataParallel has taken already stays as it is.
        for parameter in rest:
            if parameter.grad is not None:
                weigh(parameter.grad, weights[2 if id(parameter) in weighted else 0])
        self._combine(rest)

    def rest(self, optimizer: torch.optim.Optimizer) -> _Rest:
        """What is averaged here, the same on all ranks; and the replicas of the others."""
        groups = [len(g['params']) for one in self._optimizers for g in one.param_groups]
        known = *groups, *(one.at_steps or one.partly for one in self.replicas)
        if known != self._known:
            self._known = known
            by = {
                id(p): one
                for one in self.replicas
                if not (one.at_steps or one.partly)
                for p in one.trained
            }
            for each in self._optimizers:
                rest = [p for p in parameters_of(each) if id(p) not in by]
                replicas = {by[id(p)] for p in parameters_of(each) if id(p) in by}
                self._of[id(each)] = rest, replicas
        return self._of[id(optimizer)]

    def _mean(self, loss: Any) -> torch.Tensor:
        mean = torch.as_tensor(loss).detach().clone()
        weights = self._weights()
        if weights is not None:
            weigh(mean, weights[1])
            dist.all_reduce(mean, group=self._group)
        return mean


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    return id(gradient), gradient._version

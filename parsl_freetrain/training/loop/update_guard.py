"""Refuses loops that change parameters where the training does not notice."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import local, real
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.data.inside import parts_of
from parsl_freetrain.training.loop.averages import PreparedAverage
from parsl_freetrain.training.loop.changes import CONTAINERS, is_metric, is_package
from parsl_freetrain.training.loop.held import memory
from parsl_freetrain.training.loop.loop_state import LoopState, Phase
from parsl_freetrain.training.loop.places import variables
from parsl_freetrain.training.loop.rank_parts import LoopHooks
from parsl_freetrain.training.loop.unknown_state import among
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.steps.buffers import is_plain

_OFFER = (
    "for a moving average use ctx.ema(model, decay), or give torch's AveragedModel to ctx.prepare "
    "(another package's to ctx.keep), and do anything else that changes parameters in "
    'ctx.after_step(fn)'
)
_LEFT_OUT = (
    ' and was not given to ctx.prepare, so its state would be lost at the end of a fragment: give '
    'it to ctx.prepare'
)

_ANEW = (
    f'{_LEFT_OUT}, by which its parameters become a part of the training, or make it in the body, '
    'if it is to begin anew with each batch'
)
_IN_PART = (
    'is an optimizer that steps where a gradient is only that of a part of the global batch: call '
    'step() of the one that ctx.prepare returned, in the body of ctx.loop, behind backward()'
)


class UpdateGuard:
    """Compares parameters before and after the body of the user's loop. In reproducible mode it
    runs once per virtual shard and before the step, so a change there makes the result depend on
    the nodes; in every mode, a module that changes but was not prepared would be lost: its
    parameters and buffers are compared between global batches, too. In-place operations are
    noticed, except those on ``parameter.data``, which norms show in the first, second, fourth,
    eighth ... global batch. Nor may it change tensors that modules of other packages have as plain
    attributes. ``names``: variables around the loop; ``averages``: asked at the end of a
    micro-batch; ``divided``: a body has a part of a global batch.
    """

    def __init__(
        self,
        prepared: Prepared,
        names: Mapping[str, Any],
        *,
        reproducible: bool,
        divided: bool,
        averages: Sequence[PreparedAverage] = (),
        kept: Mapping[str, torch.Tensor],
    ) -> None:
        self._averages = averages
        self._divided = dict(prepared.called()) if divided else {}
        self._beside = {id(value) for *_, value in self._beside_gradients()}
        self._names: list[str] = []
        self._watched: list[torch.Tensor] = []
        ours = set(map(id, prepared.tensors()))
        known = ours.union(map(id, kept.values()))
        known |= {id(t) for one in prepared.averages for t in (*one.parameters(), *one.buffers())}
        if reproducible:
            self._add(prepared.called())
            self._add(prepared.called('averages'))
            # An average may hold the model itself (ema_pytorch's), whose buffers its passes change.
            self._add((n, t) for n, t in kept.items() if is_plain(t) and id(t) not in ours)
        self._prepared = len(self._watched)
        for called, module in among(names, torch.nn.Module).items():
            tensors = (*module.named_parameters(), *module.named_buffers())
            own = ((name, t) for name, t in tensors if id(t) not in known and is_plain(t))
            self._add((f'{called}.{name}', t) for name, t in own)
        seen = known.union(map(id, self._watched))
        for called, one in among(names, torch.Tensor).items():
            if one.requires_grad and one.is_leaf and is_plain(one) and id(one) not in seen:
                self._add([(called, one)])  # trained by hand
        self._memories = [*memories(names, [*self._watched, *prepared.tensors(), *kept.values()])]
        self._batches = 0
        self._norms: list[torch.Tensor] | None = None
        self._others: torch.Tensor | None = None
        places: dict[torch.device, list[int]] = {}
        for i, parameter in enumerate(self._watched):
            places.setdefault(parameter.device, []).append(i)
        self._where = list(places.values())
        self._versions: list[int] = []
        self._filled: list[int] = []

    def _add(self, called: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in called:
            if not (parameter.is_inference() or parameter.is_meta):
                self._names.append(name)
                self._watched.append(parameter)

    def begin_batch(self) -> None:
        others = self._watched[self._prepared :]
        if self._batches and (changed := self._changed(self._prepared)) is not None:
            self._refuse(changed, 'Between two global batches, the function')
        if self._others is not None and not torch.equal(self._others, _norms(others)):
            changed = int((self._others != _norms(others)).nonzero()[0])
            self._refuse(self._prepared + changed, 'Between two global batches, the function')
        self._batches += 1
        self._others = _norms(others) if others and self._thorough else None
        self._versions = [tensor._version for tensor in self._watched]
        self._filled = [tensor._version for *_, tensor in self._memories]
        self._norms = self._norms_now() if self._thorough else None

    @property
    def _thorough(self) -> bool:
        return self._batches & (self._batches - 1) == 0

    def _changed(self, first: int) -> int | None:
        now = [tensor._version for tensor in self._watched[first:]]
        if now == self._versions[first:]:
            return None
        pairs = enumerate(zip(now, self._versions[first:], strict=True), first)
        return next(i for i, (after, before) in pairs if after != before)

    def end_micro_batch(self) -> None:
        """Raises BadInput if an average was asked for only sometimes."""
        for average in self._averages:
            average.end_micro_batch()

    def end_body(self) -> None:
        """Call after the last micro-batch of a global batch; BadInput if a parameter changed."""
        if (changed := self._changed(0)) is not None:
            self._refuse(changed)
        for (path, kind, tensor), version in zip(self._memories, self._filled, strict=True):
            if tensor._version != version:
                raise BadInput(
                    f'The body of ctx.loop changed {path}, a tensor that no checkpoint holds: it '
                    f'is no buffer of the {kind.__name__} ({kind.__module__}). It would be lost at '
                    'the end of a fragment, and each rank or virtual shard would fill it with '
                    'samples of its own. Make it a buffer in a subclass, give that to ctx.prepare, '
                    'and use mode=Throughput(); or change it in ctx.after_step(fn), and keep it by '
                    'ctx.keep.'
                )
        if self._norms is not None:
            for name, key, value in self._beside_gradients():
                if id(value) not in self._beside:
                    raise BadInput(
                        f'The body of ctx.loop set {key} of the parameter {name}, a tensor beside '
                        'its gradient (as Opacus and BackPACK do for single samples). Of a global '
                        'batch, only gradients are added up over virtual shards and ranks, so an '
                        'optimizer would find in it a part of the samples: train with max_nodes=1 '
                        'and Reproducible(shards=1).'
                    )
            for i, before, after in zip(self._where, self._norms, self._norms_now(), strict=True):
                if not torch.equal(before, after):
                    self._refuse(i[int((before != after).nonzero()[0])])

    def _beside_gradients(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in self._divided.items():
            for key, value in vars(parameter).items():
                if isinstance(value, torch.Tensor) and key != 'grad':
                    yield name, key, value

    def _norms_now(self) -> list[torch.Tensor]:
        return [_norms([self._watched[i] for i in places]) for places in self._where]

    def _refuse(self, i: int, who: str = 'The body of ctx.loop') -> None:
        if i < self._prepared:
            raise BadInput(
                f'The body of ctx.loop changed the parameter {self._names[i]}. In reproducible '
                'mode it runs once per virtual shard and before the step of the optimizer, so '
                f'the result would depend on the number of nodes: {_OFFER}; what initialises '
                'itself in its first pass does so in ctx.warm_up(fn), before ctx.prepare.'
            )
        raise BadInput(
            f'{who} changed {self._names[i]}, a parameter or buffer that was not given to '
            'ctx.prepare, so the change would be lost at the end of the fragment: give the module '
            f'(and its optimizer, or one that trains this tensor) to ctx.prepare; {_OFFER}.'
        )


def memories(
    names: Mapping[str, Any], known: Iterable[torch.Tensor]
) -> Iterator[tuple[str, type, torch.Tensor]]:
    """The tensors that modules of other packages have as attributes, beside parameters and buffers
    (a memory of embeddings, of neighbours), by path, with the class that has them.
    """
    modules = among(names, torch.nn.Module)
    tensors = (t for one in modules.values() for t in (*one.parameters(), *one.buffers()))
    seen = {*map(memory, (*known, *tensors))}
    for path, one in modules.items():
        for inner, each in one.named_modules(prefix=path):
            kind: Any = type(each)
            own = vars(each) if is_package(kind) and not is_metric(each) else {}
            for name, value in [*own.items()]:
                several = parts_of(value) if isinstance(value, CONTAINERS) else ((name, value),)
                for tensor in (t for _, t in several if isinstance(t, torch.Tensor)):
                    plain = not (tensor.requires_grad or tensor.is_inference())
                    if plain and memory(tensor) not in seen:
                        seen.add(memory(tensor))
                        yield f'{inner}.{name}', kind, tensor


def guard_steps(prepared: Prepared, state: LoopState, spec: TrainingSpec, hooks: LoopHooks) -> Any:
    """Look at each step of any optimizer of torch while a loop trains, wherever it is kept (in a
    registry of another package). BadInput for one that ``ctx.prepare`` was not given, if it has
    prepared parameters or steps in a second global batch, as its state would be lost; and for a
    step where a gradient is only that of a part of the batch. Call what is returned at the end.
    """
    kind, there = torch.optim.Optimizer, ref(state)
    # One of a prepared optimizer's attributes is a part of it (Lookahead).
    ours = WeakSet(o for one in prepared.optimizers for o in among({'': one}, kind).values())
    known = {id(parameter) for _, parameter in prepared.named_parameters()}
    stepped = WeakKeyDictionary[torch.optim.Optimizer, int]()
    always = isinstance(spec.mode, Reproducible)
    scalers = among(variables(hooks.functions), torch.amp.GradScaler)
    for name, scaler in scalers.items():
        if scaler.is_enabled() and not any(scaler is one for one in prepared.scalers):
            raise BadInput(f'{name} is a gradient scaler{_LEFT_OUT}.')
    divided = spec.max_nodes * (spec.ranks.per_node or 1) > 1

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        now = there()
        if now is None or now.phase not in (Phase.TRAINING, Phase.EPOCH_END):
            return
        if optimizer in ours:
            within = always or (divided and torch._C._current_graph_task_id() != -1)
            why = _IN_PART if within and now.reports.in_micro_batch else ''
        elif any(id(p) in known for group in optimizer.param_groups for p in group['params']):
            why = f'is an optimizer of a prepared model{_LEFT_OUT}'
        else:
            again = stepped.setdefault(optimizer, now.reached) != now.reached
            why = f'is an optimizer that steps in several global batches{_ANEW}' if again else ''
        if why:
            found = among(variables(hooks.functions), kind)
            own = [n for n in found if found[n] is optimizer and n[:4] not in ('self', 'args')]
            named = (name for name in own if not name.endswith('._optimizer'))
            raise BadInput(f'{next(named, type(optimizer).__name__)} {why}.')

    return register_optimizer_step_pre_hook(look).remove


@torch.no_grad()
def _norms(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The bits of the tensors' norms, as NaN does not equal itself; in few operations."""
    found = [real(local(tensor)) for tensor in tensors]
    found = [t if t.is_floating_point() else t.double() for t in found]
    return torch.stack(torch._foreach_norm(found, dtype=torch.float64)).view(torch.int64)

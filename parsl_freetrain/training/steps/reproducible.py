"""Reproducible mode: the same weights, to the last bit, for any ranks and fragments."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, count, pairwise, repeat
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import parameters_of
from parsl_freetrain.training.comm.peers import gather_bytes
from parsl_freetrain.training.data.loader import MicroBatch
from parsl_freetrain.training.data.sample_order import GlobalBatch, shard
from parsl_freetrain.training.spec.mode import STOP, NonFinitePolicy
from parsl_freetrain.training.steps import deferred, scaling
from parsl_freetrain.training.steps import notes as told
from parsl_freetrain.training.steps.accumulation import UNUSED, computes_loss
from parsl_freetrain.training.steps.buffers import Buffers
from parsl_freetrain.training.steps.gradient_guard import GradientGuard, set_grad
from parsl_freetrain.training.steps.group_settings import GroupSettings
from parsl_freetrain.training.steps.host_limit import HostLimit
from parsl_freetrain.training.steps.mesh import Stepped
from parsl_freetrain.training.steps.nonfinite import all_finite, to_host
from parsl_freetrain.training.steps.reduction_tree import Node, SumOverShards
from parsl_freetrain.training.steps.scaling import ScalerOnce
from parsl_freetrain.training.steps.shard_sum import Contribution, ShardSums

_SCALED = 2  # the number of the first gradient scaler

_Look = tuple[Callable[[], float], Sequence[torch.Tensor], tuple[int, int]]
"""At a step's gradients: whether they are not finite, nor this rank's sums; from where to where."""


class ReproducibleSteps:
    """Cuts each global batch into virtual shards, one micro-batch each, and adds up their
    contributions in the order of the shards, whose number and never that of ranks decides what
    depends on a cut. The ranks' wishes are exchanged with the contributions.
    """

    delay = 0  # the ranks decide at the end of the same global batch
    adds_buffers = True

    def __init__(self, what: Stepped) -> None:
        prepared, order, device = what.prepared, what.order, what.device
        for optimizer in prepared.optimizers:
            if computes_loss(optimizer):
                raise BadInput(deferred.several_times(optimizer))
        self._prepared, self._guard = prepared, GradientGuard(())
        handed, noted = map(self._hand_over, count()), map(self._noting, count())
        nothing = repeat(lambda: self._guard.none_left)
        self.optimizers = tuple(
            map(deferred.DeferredOptimizer, prepared.optimizers, handed, nothing)
        )
        self.schedulers = tuple(map(deferred.DeferredScheduler, prepared.schedulers, noted))
        self._scalers = scaling.once(
            prepared, lambda _: self._all.world_size > self._peers.world_size
        )
        self._peers = self._all = what.peers
        shards = self._shards = order.spec.shards
        self._in_hook, self._clip, self._device = what.in_hook, what.clip_grad_norm, device
        # Ranks that divide parameters take neighbouring shards: how many, and which is this one's.
        self._width, self._place = 1, 0
        self._speeds = [speed for speed in order.speeds for _ in range(order.per_node)]
        self._lay_out()
        self._micro_batch: MicroBatch | None = None
        self._own = self._layout.empty()
        self._limit = HostLimit(shards, on=device.type == 'cuda' and hasattr(torch.cuda, '_sleep'))
        self._waiting = False  # for the first micro-batch of a global batch
        self._none_left = False
        self._alone = shards == 1 and self.adds_buffers  # its buffers are right as they are
        self._settings = GroupSettings(prepared.optimizers)
        self.before_step: list[Callable[[], object]] = []
        self.looks = False  # at the gradients of each of this rank's shards
        self.numbers: Any = None  # loop.numbers, which become those behind the first shard, too
        self.stepped = self.changed = False
        self.kept_back = False
        self._culprit, self._span = '', (0, 0)
        # If a gradient that is not finite ends the training, that may be known a step later, and
        # Python need not wait for the device in each.
        policy = NonFinitePolicy(order.spec.mode.on_nan, str(order))
        self._stop = policy.kept_back if policy.policy == STOP else None
        self._late = self._stop is not None and device.type != 'cpu'
        self._asked: _Look | None = None
        # By optimizer 0 (no step), 1, or _SCALED + the number of the scaler that steps it.
        self._stepped = [0] * len(prepared.optimizers)
        self._any_stepped = bytes(self._stepped)
        self._scaled: dict[int, ScalerOnce] = {}  # by optimizer, in this global batch
        self._scheduled: dict[tuple[int, int], float | None] = {}
        self._unwatch = deferred.watch_passes(prepared, lambda number: bool(self._stepped[number]))

    def _lay_out(self) -> None:
        """Make room for the gradients of all optimizers, each with its own, as they are now."""
        models, optimizers = self._prepared.models, self._prepared.optimizers
        self._groups = self._groups_now()
        each = [parameters_of(optimizer) for optimizer in optimizers]
        self._parameters = tuple(parameter for own in each for parameter in own)
        ends = [0, *accumulate(map(len, each))]
        self._of_optimizer = [range(*both) for both in pairwise(ends)]
        self.shares = len(set(map(id, self._parameters))) < len(self._parameters)
        summed = models if self.adds_buffers else ()
        self._layout = ShardSums(self._parameters, summed, self._device, self._peers.world_size)
        self._buffers = self._layout.buffers if self.adds_buffers else Buffers(models)
        self._sum = SumOverShards(self._layout, self._peers, self._shards, self._speeds)
        self._guard.watch(self._parameters)

    def _groups_now(self) -> list[int]:
        return [len(g['params']) for one in self._prepared.optimizers for g in one.param_groups]

    def culprit(self) -> str:
        """The ranks whose gradients in the last batch were not finite, as part of a sentence."""
        return self._culprit

    def limit(self, micro_batch: int | None, batch_size: int) -> None:
        largest = math.ceil(batch_size / self._shards)
        if micro_batch is not None and largest > micro_batch:
            raise BadInput(
                f'ctx.loop was given micro_batch={micro_batch}, but each of the {self._shards} '
                f'virtual shards of a global batch of {batch_size} samples has up to {largest}, '
                'which are trained in one pass: say mode=Reproducible(shards='
                f'{math.ceil(batch_size / micro_batch)}) or more.'
            )

    def micro_batches(self, batch: GlobalBatch) -> list[MicroBatch]:
        """This rank's micro-batches: one for each shard not empty (or a neighbour there)."""
        parts = shard(batch.indices, self._shards)
        own, size = batch.indices[:1], len(batch.indices)
        mine = [node[0] + self._place for node in self._nodes() if any(parts[slice(*node)])]
        return [
            MicroBatch(tuple(parts[s] or own), batch.samples_before, s, len(parts[s]) / size)
            for s in mine
        ]

    @torch.no_grad()
    def begin(self, batch: GlobalBatch, guarded: bool) -> None:
        """Call before the micro-batches of a global batch. Steps are always guarded here."""
        self._span = batch.samples_before, batch.samples_after
        if self._groups_now() != self._groups:
            self._lay_out()
        sizes = list(map(len, shard(batch.indices, self._shards)))
        self._sum.begin(sizes, self._nodes(), looks=self.looks)
        self._settings.begin_batch()
        self.changed, self._waiting = False, True
        self._any_stepped, self._scheduled = bytes(len(self._stepped)), {}
        if not (self._alone and self._late):  # else nothing puts them back
            self._buffers.remember()
        if self.numbers is not None:
            self.numbers.remember(batch.indices)

    @torch.no_grad()
    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Call before a micro-batch. Every shard starts from the same state."""
        self._micro_batch = micro_batch
        self._limit.begin()
        self._guard.begin_micro_batch(self._shards > 1)
        self._settings.begin_micro_batch()
        self._own = self._layout.empty()
        self._stepped = [0] * len(self._stepped)
        for scaler in self._scalers:
            scaler.waits, scaler.updated = True, False
        if self._waiting or not self._none_left:
            deque(map(set_grad, self._parameters, repeat(None)), 0)
        if not self._waiting:
            self._buffers.undo()

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        self._none_left = self._guard.none_left
        self._guard.end_micro_batch()
        micro_batch, layout = self._current_micro_batch, self._layout
        for number, stepped in enumerate(self._stepped):
            own = self._of_optimizer[number]
            if not stepped and any(layout.parameters[i].grad is not None for i in own):
                raise BadInput(UNUSED)
        self._any_stepped = told.most([self._any_stepped, bytes(self._stepped)])
        for scaler in self._scalers:
            scaler.waits = False
        self._settings.end_micro_batch()
        self._buffers.take()
        if self._waiting and not self._alone:
            self._buffers.note_first()
        if self.numbers is not None:
            shard = micro_batch.part if micro_batch.weight else None
            self.numbers.undo(shard, first=self._waiting and not self._alone)
        self._waiting = False
        if not self._alone:
            self._put_buffers(self._own, self._sum.weight(micro_batch.part))
        self._sum.add(self._node_of(micro_batch), self._own)
        self._micro_batch = None
        self._limit.end(len(self._sum.mine) // self._width, max(self._sum.sizes))

    @torch.no_grad()
    def end(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int:
        """Exchange, then step once unless the gradient is not finite; the maximum of all wishes."""
        self._unwatch()
        notes, total, culprits = self._exchange(wish())
        self.changed = True
        self.kept_back = culprits is not None
        self._culprit = _named(culprits)
        if self.kept_back:
            self._buffers.undo()
        self._layout.give(total)
        stepped = told.most(one.stepped for one in notes)
        self.stepped |= any(stepped)
        if not self.kept_back:
            for number, scaler in self._scaled.items() if not self.shares else ():
                scaler.unscale_(self._prepared.optimizers[number])
            for hook in self.before_step:
                hook()
            if self._clip is not None and not self.shares:
                self._clip_gradients(self._clip, self._layout.parameters)
            for number, optimizer in enumerate(self._prepared.optimizers):
                if stepped[number]:
                    if self.shares:  # each steps with the gradients of its own loss
                        own = self._of_optimizer[number]
                        self._layout.give(total, own)
                        if number in self._scaled:
                            self._scaled[number].unscale_(optimizer)
                        if self._clip is not None:
                            self._clip_gradients(self._clip, [self._parameters[i] for i in own])
                    deferred.step_once(optimizer, self._scaled.get(number))
            for scaler in set(self._scaled.values()):
                scaler.update()
        scheduled = told.scheduled_in(notes, len(self._prepared.schedulers), self._sum.sizes)
        for scheduler, calls in zip(self._prepared.schedulers, scheduled, strict=True):
            for value in calls:
                scheduler.step(*(() if value is None else (value,)))
        return max(one.wish for one in notes)

    def _nodes(self) -> list[Node]:
        """The shards of each micro-batch of this rank, and the neighbours that other ranks take."""
        return [(s, s + self._width) for s in self._sum.mine[:: self._width]]

    def _node_of(self, micro_batch: MicroBatch) -> Node:
        first = micro_batch.part - self._place
        return first, first + self._width

    def _put_buffers(self, into: Contribution, weight: float) -> None:
        self._layout.put_buffers(into, weight)

    def _clip_gradients(self, largest: float, parameters: Sequence[torch.nn.Parameter]) -> None:
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], largest)

    def _exchange(self, wish: int) -> tuple[list[told.Notes], Contribution, list[int] | None]:
        """What all ranks know, the sum of shards, whose gradients are not finite; and buffers."""
        notes = self._tell(wish)
        if self.numbers is not None:
            first = self._sum.first_rank
            changed = any(one.numbers for one in notes)
            self.numbers.take_firsts(self._all, first, changed=changed)
        total = self._sum.total(told.most(one.present for one in notes))
        stepped = enumerate(told.most(one.stepped for one in notes))
        self._scaled = {i: self._scalers[how - _SCALED] for i, how in stepped if how >= _SCALED}
        culprits = self._culprits(total)
        if culprits is None:
            self._take_buffers(total, notes)
        return notes, total, culprits

    def _tell(self, wish: int) -> list[told.Notes]:
        """Exchange with all ranks what they know without their devices."""
        several = self._all.world_size > 1
        own = told.Notes(
            wish,
            self._settings.digest() if several else b'',
            self._sum.present() if several else b'',
            self._any_stepped,
            [(part, i, value) for (part, i), value in self._scheduled.items()],
            self._buffers.changed_firsts,
            self.numbers is not None and self.numbers.changed,
        )
        most = self._sum.most, len(self._prepared.schedulers), len(self._buffers.integers)
        notes = told.exchange(self._all, own, *most)
        if any(one.settings != notes[0].settings for one in notes):
            self._settings.agree(self._all)
        return notes

    def digests(self) -> dict[Node, dict[int, int]]:
        """By shards whose sum this rank has or had, bit sums of gradients by parameters' ids."""
        self._sum.look()
        names, found = list(map(id, self._parameters)), self._sum.digests
        return {n: dict(zip(names, sums.tolist(), strict=True)) for n, sums in found.items()}

    def settle(self) -> None:
        """Wait, all ranks, until the last gradient is known to be finite; else BadInput."""
        asked, self._asked = self._asked, None
        ranks = self._found(asked) if asked is not None else None
        if asked is not None and ranks is not None and self._stop is not None:
            self._stop(*asked[2], _named(ranks))

    def _culprits(self, total: Contribution) -> list[int] | None:
        """Ranks whose gradient is not finite, or None. The only read of the device in a step."""
        gradients, spoilt = self._looked_at(total)
        if not gradients:
            return None
        asked = to_host(spoilt)[1], self._sum.bad, self._span
        if self._late:
            self.settle()
            self._asked, found = asked, None
        else:
            found = self._found(asked)
        if self._device.type == 'cpu' and found is not None and all_finite(gradients):
            return None
        return found

    def _looked_at(self, total: Contribution) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Gradients that must be finite, and 0 if they are. Scalers look at those of theirs."""
        if not self._scaled:
            return total.present, self._sum.spoilt
        own = [j for i, own in enumerate(self._of_optimizer) if i not in self._scaled for j in own]
        others = [gradient for j in own if (gradient := total.gradients[j]) is not None]
        return others, self._layout.scale(others)

    def _found(self, asked: _Look) -> list[int] | None:
        spoilt, bad, _ = asked
        if not spoilt():
            return None
        if self._all.world_size == 1:
            return [0]
        said = gather_bytes(self._all, bytes([any(map(float, bad))]), 1)
        return [rank for rank, bad in enumerate(said) if bad[0]]

    def _take_buffers(self, total: Contribution, notes: Sequence[told.Notes]) -> None:
        """Set buffers to what the sums say, integer ones to the first shard's that is not empty."""
        if self._alone:
            return
        if self._buffers.row_size:
            self._buffers.settle(total.buffers)
        first = self._sum.first_rank
        self._buffers.take_firsts(self._peers, first, notes[first].integers)

    def _hand_over(self, number: int) -> Callable[[], None]:
        def hand_over() -> None:
            micro_batch, layout = self._current_micro_batch, self._layout
            if self._stepped[number]:
                raise BadInput(
                    'optimizer.step() was called twice in one iteration of ctx.loop: call it once '
                    'in every iteration, each with a batch of its own (of two networks, one may '
                    'step in some iterations only, by ctx.samples), or use mode=Throughput().'
                )
            scaler = scaling.stepping(self._scalers)
            self._stepped[number] = 1 if scaler is None else _SCALED + self._scalers.index(scaler)
            self._settings.wants_step(number)
            own = self._of_optimizer[number]
            gradients = self._guard.take(layout.parameters[own.start : own.stop])
            with torch.no_grad():
                # FSDP has weighted the gradients that it has added up.
                weight = 1.0 if self._width > 1 else self._sum.weight(micro_batch.part)
                if micro_batch.share is not None:
                    weight = micro_batch.share * self._sum.whole
                self.stepped = True
                layout.put(self._own, own, gradients, weight)

        return hand_over

    def _noting(self, number: int) -> Callable[..., None]:
        def note(*args: Any, **kwargs: Any) -> None:
            if self._micro_batch is not None:
                value = deferred.number_in([*args, *kwargs.values()])
                self._scheduled[self._micro_batch.part, number] = value
            elif self._in_hook():
                self._prepared.schedulers[number].step(*args, **kwargs)
            else:
                raise BadInput(
                    'scheduler.step() was called outside of ctx.loop: call it in the loop, once in '
                    'every iteration, or once per epoch in a function given to ctx.each_epoch.'
                )

        return note

    @property
    def _current_micro_batch(self) -> MicroBatch:
        if self._micro_batch is None:
            raise BadInput(
                'optimizer.step() was called outside of ctx.loop, which counts the samples.'
            )
        return self._micro_batch


def _named(ranks: Sequence[int] | None) -> str:
    return f', on rank {", ".join(map(str, ranks))}' if ranks else ''

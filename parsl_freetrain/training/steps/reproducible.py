"""Reproducible mode: the same weights, to the last bit, for any number of ranks and wherever
training is cut into fragments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader import MicroBatch
from parsl_freetrain.training.data.sample_order import GlobalBatch, shard, shards_of_rank
from parsl_freetrain.training.steps.buffers import Buffers
from parsl_freetrain.training.steps.deferred import NO_SCALER, DeferredOptimizer, DeferredScheduler
from parsl_freetrain.training.steps.gradient_guard import GradientGuard
from parsl_freetrain.training.steps.group_settings import GroupSettings
from parsl_freetrain.training.steps.reduction_tree import Node, ShardTree
from parsl_freetrain.training.steps.shard_sum import Contribution, Layout
from parsl_freetrain.training.steps.tree_exchange import TreeExchange


class ReproducibleSteps:
    """Cuts each global batch into virtual shards, one micro-batch each, and adds up their
    contributions in the order of the shards.

    What depends on how a batch is cut (sums, batch statistics, dropout) depends on the number of
    virtual shards, never on the number of ranks. The ranks' wishes (to stop, to save) are exchanged
    together with the contributions.
    """

    delay = 0  # the ranks decide at the end of the same global batch

    def __init__(
        self,
        prepared: Prepared,
        peers: Peers,
        shards: int,
        clip_grad_norm: float | None,
        device: torch.device,
        in_hook: Callable[[], bool],
        speeds: Sequence[float] = (),
    ) -> None:
        if any(scaler.is_enabled() for scaler in prepared.scalers):
            raise BadInput(NO_SCALER)
        for optimizer in prepared.optimizers:
            closure = signature(optimizer.step).parameters.get('closure')
            if closure is not None and closure.default is Parameter.empty:
                raise BadInput(
                    f'ctx.prepare was given {type(optimizer).__name__}, which computes the loss '
                    'several times in a step, and reproducible mode has one gradient for it: use '
                    'mode=Throughput(), or another optimizer.'
                )
        self._prepared = prepared
        self._peers = peers
        self._shards = shards
        self._in_hook = in_hook
        self._clip = clip_grad_norm
        self._device = device
        self._tree = ShardTree(shards)
        ranges = [
            shards_of_rank(shards, peers.world_size, rank, speeds)
            for rank in range(peers.world_size)
        ]
        self._mine = ranges[peers.rank]
        # In a micro-batch, ranks that divide parameters take neighbouring shards: how many, and
        # which of them this rank takes.
        self._width, self._place = 1, 0
        self._covers = [self._tree.cover(shards_) for shards_ in ranges]
        parameters: dict[int, torch.nn.Parameter] = {}
        self._of_optimizer: list[set[int]] = []
        for optimizer in prepared.optimizers:
            own = {
                id(parameter): parameter
                for group in optimizer.param_groups
                for parameter in group['params']
            }
            parameters.update(own)
            self._of_optimizer.append(set(own))
        self._parameters = tuple(parameters.values())
        self._buffers = Buffers(prepared.models)
        # All parameters, frozen or not: the function may unfreeze some in another rank's
        # micro-batch.
        self._layout = Layout(
            self._parameters,
            self._buffers.floating,
            self._buffers.integers,
            len(prepared.optimizers),
            len(prepared.schedulers),
            device,
            peers.world_size,
        )
        self._ranks = TreeExchange(self._tree, peers)
        self._sums: dict[Node, Contribution | None] = {}
        self._sizes: tuple[int, ...] = ()
        self._micro_batch: MicroBatch | None = None
        self._own = Contribution(torch.empty(0), torch.empty(0))
        self._guard = GradientGuard(self._parameters)
        self._settings = GroupSettings(prepared.optimizers)
        self.before_step: list[Callable[[], object]] = []
        self.stepped = self.changed = False
        self.kept_back = False
        self._culprit = ''
        self._stepped = [False] * len(prepared.optimizers)
        self._scheduled: list[tuple[float | None, ...]] = [()] * len(prepared.schedulers)

    def culprit(self) -> str:
        """The ranks whose gradients in the last batch were not finite, as part of a sentence."""
        return self._culprit

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The stand-ins for the optimizers in the user's loop."""
        return tuple(
            DeferredOptimizer(optimizer, self._hand_over(i))
            for i, optimizer in enumerate(self._prepared.optimizers)
        )

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The stand-ins for the schedulers in the user's loop."""
        return tuple(
            DeferredScheduler(scheduler, self._noting(i))
            for i, scheduler in enumerate(self._prepared.schedulers)
        )

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The models, as they were given."""
        return self._prepared.models

    def limit(self, micro_batch: int | None, batch_size: int) -> None:
        """Refuse virtual shards with more than ``micro_batch`` samples; raises BadInput."""
        largest = math.ceil(batch_size / self._shards)
        if micro_batch is not None and largest > micro_batch:
            raise BadInput(
                f'ctx.loop was given micro_batch={micro_batch}, but each of the {self._shards} '
                f'virtual shards of a global batch of {batch_size} samples has up to {largest}, '
                'which are trained in one pass: say mode=Reproducible(shards='
                f'{math.ceil(batch_size / micro_batch)}) or more.'
            )

    def micro_batches(self, batch: GlobalBatch) -> list[MicroBatch]:
        """The micro-batches of this rank for a global batch: one for each of its shards that is not
        empty or has a neighbour in the same micro-batch that is not.
        """
        parts = shard(batch.indices, self._shards)
        return [
            MicroBatch(
                tuple(parts[s] or batch.indices[:1]),
                batch.samples_before,
                s,
                len(parts[s]) / len(batch.indices),
            )
            for node in self._nodes()
            for s in (node[0] + self._place,)
            if any(parts[slice(*node)])
        ]

    @torch.no_grad()
    def begin(self, batch: GlobalBatch, guarded: bool) -> None:
        """Call before the micro-batches of a global batch. Steps are always guarded here."""
        self._sizes = tuple(len(part) for part in shard(batch.indices, self._shards))
        self._sums = {}
        self._settings.begin_batch()
        self.changed = False
        for node in self._nodes():
            if not any(self._sizes[slice(*node)]):
                self._tree.add(self._sums, node, None, self._layout.plus)
        self._buffers.remember()

    @torch.no_grad()
    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Call before a micro-batch. Every shard starts from the same state."""
        self._micro_batch = micro_batch
        self._guard.begin_micro_batch(self._shards > 1)
        self._settings.begin_micro_batch()
        self._own = self._layout.empty()
        self._stepped = [False] * len(self._stepped)
        self._scheduled = [()] * len(self._scheduled)
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.undo()

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Call after a micro-batch."""
        self._guard.end_micro_batch()
        micro_batch, layout = self._current_micro_batch, self._layout
        for i, stepped in enumerate(self._stepped):
            if not stepped and any(
                p.grad is not None for p in layout.parameters if id(p) in self._of_optimizer[i]
            ):
                raise BadInput(
                    'An iteration of ctx.loop ended with gradients that were not used: call '
                    'optimizer.step() once in every iteration (use a larger batch_size instead of '
                    'gradient accumulation).'
                )
        self._settings.end_micro_batch()
        self._buffers.take()
        layout.put_missing(self._own)
        layout.put_buffers(self._own, self._buffers.before, micro_batch.weight)
        layout.put_steps(self._own, self._stepped, self._scheduled, micro_batch.weight)
        self._complete()
        self._tree.add(self._sums, self._node_of(micro_batch), self._own, layout.plus)
        self._micro_batch = None

    @torch.no_grad()
    def end(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int:
        """Call after the micro-batches: exchange, then step once, unless the gradient is not
        finite. Returns the maximum of all ranks' wishes.
        """
        layout = self._layout
        # Checked before the sum over all ranks, which hides the culprit.
        bad = not all(own is None or layout.is_finite(own) for own in self._sums.values())
        decision, culprits = self._exchange(wish(), bad)
        self.changed = True
        total = self._tree.total(self._sums, layout.plus)
        assert total is not None
        self._sums = {}
        self.kept_back = bool(culprits) or not layout.is_finite(total)
        self._culprit = f', on rank {", ".join(map(str, culprits))}' if culprits else ''
        if self.kept_back:
            self._buffers.undo()
        else:
            layout.take_buffers(total, self._buffers.before)
        layout.take_gradients(total)
        stepped, scheduled = layout.steps_in(total)
        self.stepped |= any(stepped)
        if not self.kept_back:
            for hook in self.before_step:
                hook()
            if self._clip is not None:
                self._clip_gradients(self._clip)
            for optimizer, wanted in zip(self._prepared.optimizers, stepped, strict=True):
                if wanted:
                    optimizer.step()
        for scheduler, calls in zip(self._prepared.schedulers, scheduled, strict=True):
            for value in calls:
                scheduler.step(*(() if value is None else (value,)))
        return decision

    def _nodes(self) -> list[Node]:
        """The shards of each micro-batch of this rank, and the neighbours that other ranks take."""
        return [(s, s + self._width) for s in self._mine[:: self._width]]

    def _node_of(self, micro_batch: MicroBatch) -> Node:
        first = micro_batch.part - self._place
        return first, first + self._width

    def _complete(self) -> None:
        """Make the contribution of a micro-batch that of all its shards."""

    def _clip_gradients(self, largest: float) -> None:
        torch.nn.utils.clip_grad_norm_(
            [p for p in self._layout.parameters if p.grad is not None], largest
        )

    def _exchange(self, wish: int, bad: bool) -> tuple[int, list[int]]:
        """Exchange sums with the other ranks. Returns the maximum wish, and the ranks whose sums
        are not finite.
        """
        if self._peers.world_size == 1:
            return wish, [0] * bad
        nodes = [[node for node in cover if self._has_samples(node)] for cover in self._covers]
        mine = {node: own for node, own in self._sums.items() if own is not None}
        firsts = self._layout.firsts_of([mine[node] for node in nodes[self._peers.rank][:1]])
        head = [wish, bad, *self._settings.digest()]
        row = torch.cat([firsts.new_tensor(head), firsts])
        rows = self._peers.all_gather(row)
        self._compare(rows[:, 2 : len(head)], self._peers)
        into, *others = mine.values() if mine else [self._layout.empty()]
        self._ranks.add_up(
            {node: own.sums for node, own in mine.items()},
            nodes,
            [node for cover in self._covers for node in cover if not self._has_samples(node)],
            into.sums,
        )
        self._layout.release(others)
        first = next(rank for rank, theirs in enumerate(nodes) if theirs)
        self._sums = {self._tree.root: Contribution(into.sums, rows[first][len(head) :])}
        return max(int(other[0]) for other in rows), [
            rank for rank, other in enumerate(rows) if other[1]
        ]

    def _compare(self, digests: torch.Tensor, peers: Peers) -> None:
        if not bool((digests == digests[0]).all()):
            self._settings.agree(peers)

    def _has_samples(self, node: Node) -> bool:
        return any(self._sizes[slice(*node)])

    def _hand_over(self, number: int) -> Callable[[], None]:
        def hand_over() -> None:
            micro_batch, layout = self._current_micro_batch, self._layout
            if self._stepped[number]:
                raise BadInput(
                    'optimizer.step() was called twice in one iteration of ctx.loop: call it '
                    'once in every iteration.'
                )
            self._stepped[number] = True
            self._settings.wants_step(number)
            self._guard.check(p for p in layout.parameters if id(p) in self._of_optimizer[number])
            with torch.no_grad():
                for i, parameter in enumerate(layout.parameters):
                    if id(parameter) in self._of_optimizer[number]:
                        # FSDP has weighted the gradients that it has added up.
                        layout.put_gradient(
                            self._own, i, 1.0 if self._width > 1 else micro_batch.weight
                        )

        return hand_over

    def _noting(self, number: int) -> Callable[[float | None], None]:
        def note(value: float | None) -> None:
            if self._micro_batch is not None:
                self._scheduled[number] = (value,)
            elif self._in_hook():
                self._prepared.schedulers[number].step(*(() if value is None else (value,)))
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
                'optimizer.step() was called outside of ctx.loop: call it in the loop, which '
                'counts the samples.'
            )
        return self._micro_batch

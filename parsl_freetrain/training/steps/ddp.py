"""Throughput and scaled mode: DistributedDataParallel, in which every sample counts the same."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of
from parsl_freetrain.training.comm.peers import Agreed, Agreement
from parsl_freetrain.training.data.loader import MicroBatch
from parsl_freetrain.training.data.sample_order import GlobalBatch, shard, split_for_ranks
from parsl_freetrain.training.spec.mode import ADASUM
from parsl_freetrain.training.steps import row_norm, scaling
from parsl_freetrain.training.steps.accumulation import UNUSED, Accumulation, buckets, weigh
from parsl_freetrain.training.steps.adasum import combine
from parsl_freetrain.training.steps.buffers import Buffers
from parsl_freetrain.training.steps.group_settings import GroupSettings
from parsl_freetrain.training.steps.mesh import Stepped, fsdp_modules
from parsl_freetrain.training.steps.nonfinite import NEVER, FirstNonFinite, Guard
from parsl_freetrain.training.steps.replica import MeanAtSteps, Replica, with_shared_parts


class ThroughputSteps:
    """One micro-batch per global batch, this rank's part of it, or several if the user asks for
    them. Gradients are averaged over the ranks that hold the same parameters, or combined by
    ``adasum``; in a pipeline when the optimizer steps.
    """

    def __init__(self, what: Stepped) -> None:
        prepared, peers, division = what.prepared, what.peers, what.division
        self._prepared, self._peers, self._division = prepared, peers, division
        self._adasum = getattr(what.order.spec.mode, 'combine', None) == ADASUM
        if any(isinstance(model, torch.jit.ScriptModule) for model in prepared.models):
            raise BadInput(
                'ctx.prepare was given a model of torch.jit, of which several ranks of throughput '
                'or scaled mode cannot take the mean: give it the module itself (torch.compile '
                'makes it fast, too), or train in reproducible mode.'
            )
        if not all(hasattr(one, '_optimizer_step_pre_hooks') for one in prepared.optimizers):
            raise BadInput('An optimizer without hooks (Opacus): train in reproducible mode.')
        self._settings = GroupSettings(prepared.optimizers)
        if not division.pipelined:  # stages have optimizers of their own
            self._settings.follow_steps()
        self._scalers = scaling.once(prepared, self._differ)
        self._agreement = Agreement(peers, same=lambda: self._settings.history)
        self._non_finite = FirstNonFinite(prepared.models, what.device)
        self._buffers = Buffers(prepared.models)
        self.optimizers, self.schedulers = prepared.optimizers, prepared.schedulers
        self._hooks: list[RemovableHandle] = []
        self._factor = self._weight = self._own_share = 1.0  # the last: of the batch's samples
        self._rest: MeanAtSteps | None = None
        # A pipeline runs its own backward passes even if it has only one stage here.
        self._at_step = division.pipelined or any(
            getattr(model, 'many_backward_passes', False) for model in prepared.models
        )
        self._micro_batch: int | None = None
        self._accumulation: Accumulation | None = None
        self._mean = None
        if fsdp_modules(prepared.models):
            from parsl_freetrain.training.steps.sharded import MeanOfParts  # imports FSDP2

            self._mean = MeanOfParts(prepared.models, division, self._non_finite.note)
        self._replicas = [*self._wrapped(what.find_unused_parameters)]
        # Hooks run in this order: averaging first, so that all ranks check and clip the same.
        if self._at_step:
            for optimizer in prepared.optimizers:
                optimizer.register_step_pre_hook(self._average)
        elif division.shape.data > 1 and self._mean is None:
            how = self._buffers, division.data_group, self._combine, self._weights
            self._rest = MeanAtSteps(prepared, self._replicas, *how)
        self._guard = Guard(prepared.optimizers, self._anywhere)
        self.before_step: list[Callable[[], object]] = []
        self.stepped = prepared.scales  # it may skip steps
        self._hooks_ran = self.changed = self._any_step = False
        self._add_hooks(prepared, what.clip_grad_norm)

    def _add_hooks(self, prepared: Prepared, clip_grad_norm: float | None) -> None:
        for optimizer in prepared.optimizers:
            optimizer.register_step_pre_hook(self._run_hooks)
            if clip_grad_norm is not None:
                optimizer.register_step_pre_hook(partial(self._clip_to, clip_grad_norm))
            optimizer.register_step_pre_hook(self._begins_to_change)

    @property
    def delay(self) -> int:
        return self._agreement.delay

    @property
    def whole_weight(self) -> float | None:
        """This rank's share of the global batch; None: it has several passes or other sums."""
        several = self._accumulation is not None and self._accumulation.on
        return None if several or self._adasum or self._at_step else self._weight

    def limit(self, micro_batch: int | None, batch_size: int) -> None:
        """Micro-batches have so many samples at most from now on (None: no limit); or BadInput."""
        self._micro_batch = micro_batch
        if micro_batch is None or self._accumulation is not None:
            return
        if self._at_step:
            raise BadInput(
                'ctx.loop was given micro_batch, but a pipeline divides its batches by itself: '
                'leave it out, and give the Pipeline more micro-batches.'
            )
        self._accumulation = Accumulation(self._prepared, self._combine, self._scalers)

    def micro_batches(self, batch: GlobalBatch) -> list[MicroBatch]:
        """As many on every rank, as DDP and FSDP need; empty ones have weight 0."""
        own = split_for_ranks(batch.indices, self._division.parts, self._division.data_rank)
        first, before, size = tuple(batch.indices[:1]), batch.samples_before, len(batch.indices)
        rank = self._division.data_rank
        return [
            MicroBatch(part or first, before, rank, len(part) / size, number)
            for number, part in enumerate(shard(own, self._number_of_micro_batches(batch)))
        ]

    def _number_of_micro_batches(self, batch: GlobalBatch) -> int:
        largest = math.ceil(len(batch.indices) / self._division.parts)
        return math.ceil(largest / (self._micro_batch or largest))

    def begin(self, batch: GlobalBatch, guarded: bool) -> None:
        """Call before a global batch. ``guarded``: skip the step if a gradient is not finite."""
        self._guard.on = guarded
        self.changed = self._hooks_ran = self._any_step = False
        self._non_finite.next_step()
        if guarded:
            self._guard.bad = False
            self._buffers.remember()
        if self._rest is not None:
            self._rest.begin()
        if self._mean is not None:
            self._mean.alike = len(batch.indices) % self._division.parts == 0
        if self._accumulation is None:
            return
        own = split_for_ranks(batch.indices, self._division.parts, self._division.data_rank)
        self._own_share = len(own) / len(batch.indices)
        self._accumulation.begin(self._number_of_micro_batches(batch))
        for replica in self._replicas:
            replica.ddp.require_backward_grad_sync = not self._accumulation.on

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        share = micro_batch.weight if micro_batch.share is None else micro_batch.share
        self._weight = share
        if self._mean is not None:
            self._mean.weight = micro_batch.weight
        accumulation = self._accumulation
        if accumulation is not None and accumulation.on:
            weight = 1.0 if self._mean is not None else share  # FSDP has weighted them
            if self._adasum and self._own_share:
                weight /= self._own_share
            accumulation.begin_micro_batch(micro_batch.weight, weight)
            self._stop_counting()
        elif self._mean is None and not self._at_step:
            self._count_gradients(share)

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        if self._accumulation is not None:
            self._accumulation.end_micro_batch()
        accumulates = self._accumulation is not None and self._accumulation.on
        if not (self._any_step or accumulates or self._prepared.scalers):
            every = (p for one in self._prepared.optimizers for p in parameters_of(one))
            if any(p.grad is not None for p in every):
                raise BadInput(UNUSED)
        if self.kept_back:
            self._buffers.undo()

    def _differ(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ranks have gradients of their own where a scaler has unscaled them."""
        own = self._at_step or not self._division.alike
        if not own and self._rest is not None and self._weights() is not None:
            own = self._rest.unscaled(optimizer)
        return own and self._peers.world_size > 1

    @property
    def kept_back(self) -> bool:
        return self._guard.on and self._guard.bad

    def end(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int:
        """Call after it. Returns the maximum of all wishes, up to :attr:`delay` batches old."""
        decision = self._agreement.after_step(wish, time_left)
        if decision == Agreed.DIFFERENT:
            self._settings.refuse(self._peers)
        return decision

    def settle(self) -> None:
        """What is done with the state looks at its numbers."""

    def culprit(self) -> str:
        """Whose gradient was not finite first, as part of a sentence. All ranks call this."""
        steps = [int(row) for row in self._peers.all_gather(self._non_finite.first())]
        self._non_finite.forget()
        culprits = [str(rank) for rank, step in enumerate(steps) if step == min(steps) < NEVER]
        return f', on rank {", ".join(culprits)}' if culprits else ''

    def _anywhere(self, bad: bool) -> bool:
        """Whether a gradient is not finite on any rank; parts are seen by their rank only."""
        return bad if self._mean is None else bool(self._peers.all_reduce_max((bad,))()[0])

    def _count_gradients(self, weight: float) -> None:
        """Weight this rank's gradient by its samples if ranks differ: hooks cost time."""
        factor = weight * self._division.shape.data
        if self._adasum:
            factor = 1.0 if weight else 0.0
        self._factor = 1.0 if abs(factor - 1) < 1e-9 else factor
        if self._factor == 1:
            self._stop_counting()
        elif not self._hooks:
            self._hooks = [
                parameter.register_hook(partial(self._counted, replica))
                for replica in self._replicas
                for parameter in replica.trained
                if parameter.requires_grad
            ]

    def _stop_counting(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _counted(self, replica: Replica, gradient: torch.Tensor) -> torch.Tensor:
        factor = 1.0 if replica.at_steps else self._factor
        return gradient * factor if factor else torch.zeros_like(gradient)  # 0 x inf is not 0

    def _weights(self) -> tuple[float, float, float] | None:
        """As of :class:`MeanAtSteps`. Adasum takes gradients as they are."""
        if self._accumulation is not None and self._accumulation.on:
            return None
        if self._adasum:
            return float(bool(self._weight)), self._weight, 1.0
        return self._weight, self._weight, 1 / self._division.shape.data

    def _clip_to(self, norm: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
        given = [p for p in parameters_of(optimizer) if p.grad is not None]
        if self._mean is not None:  # ranks have parts of the parameters
            row_norm.clip(given, self._division.mesh, norm)
        else:
            torch.nn.utils.clip_grad_norm_(given, norm)

    def _begins_to_change(self, *_: object) -> None:
        self.changed = True

    def _run_hooks(self, *_: object) -> None:
        self.stepped = self._any_step = True
        if not self._hooks_ran and not self.kept_back:
            self._hooks_ran = True
            for hook in self.before_step:
                hook()

    def _wrapped(self, find_unused_parameters: bool) -> Iterator[Replica]:
        if self._division.shape.data == 1 or self._at_step or self._mean is not None:
            return
        shared = with_shared_parts(self._prepared.models)
        for model in self._prepared.models:
            frozen = not any(parameter.requires_grad for parameter in model.parameters())
            if frozen or any(model is m for m in shared):
                continue
            # With views, gradients need not be copied to and from the buffers that are exchanged.
            replica = Replica(
                model,
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=True,
                process_group=self._division.data_group,
            )
            if self._adasum:
                # A lambda, since DDP checks annotations and rejects texts, as they are here.
                replica.ddp.register_comm_hook(None, lambda state, bucket: self._combined(bucket))
            yield replica

    @torch.no_grad()
    def _average(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._division.shape.data == 1:
            return
        group = self._division.data_group
        waiting = []
        every = (parameter.grad for parameter in parameters_of(optimizer))
        for gradient in (one for one in every if one is not None):
            weigh(gradient, self._weight)
            waiting.append(dist.all_reduce(gradient, group=group, async_op=True))
        for work in waiting:
            if work is not None:
                work.wait()

    @torch.no_grad()
    def _combine(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add up the gradients of all copies of the model, or combine them by Adasum."""
        if self._division.shape.data == 1 or self._mean is not None:
            return
        used = self._peers.all_reduce_max([one.grad is not None for one in parameters])()
        gradients = []
        for parameter in compress(parameters, used):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for bucket in buckets(gradients):
            row = torch.cat([gradient.flatten() for gradient in bucket])
            sizes = [gradient.numel() for gradient in bucket]
            if self._adasum:
                peers = self._peers
                row = combine(row, sizes, peers.rank, peers.world_size, peers.sendrecv)
            else:
                dist.all_reduce(row, group=self._division.data_group)
            for gradient, total in zip(bucket, row.split(sizes), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _combined(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        peers, row = self._peers, bucket.buffer()
        done.set_result(combine(row, sizes, peers.rank, peers.world_size, peers.sendrecv))
        return done

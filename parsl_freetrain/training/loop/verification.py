"""Verified resumes: a fragment proves by its first step that it continues the training that it was
given. For each checkpoint the digest of the following step is kept (:class:`NextStep`), which must
be the same on any nodes in reproducible mode; in others, the state before it and the samples, and
with as many ranks its loss and gradients, up to rounding: a difference is a warning there.
"""

import math
import sys
import zlib
from collections import ChainMap
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint import next_step
from parsl_freetrain.training.checkpoint.local_shard import holders, is_divided, local
from parsl_freetrain.training.checkpoint.next_step import Measured, NextStep, difference
from parsl_freetrain.training.checkpoint.state import Position, Source
from parsl_freetrain.training.comm.devices import computes_as
from parsl_freetrain.training.comm.peers import gather
from parsl_freetrain.training.data.sample_order import GlobalBatch
from parsl_freetrain.training.loop import unknown_state
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.places import variables
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.loop.save_timing import Background
from parsl_freetrain.training.spec.mode import Reproducible, Scaled
from parsl_freetrain.training.steps import backward
from parsl_freetrain.training.steps.bit_sums import MODULO, as_plain, bit_sums
from parsl_freetrain.training.steps.group_settings import settings_of
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps

_NOTHING_FOUND = (
    'Variables of the function hold no module, optimizer, generator or iterator that ctx does not '
    'know, and none has changed: what is lost may be in a dataset, a file, os.environ, a cache or '
    'another package, random numbers may have no seed, or the function is another one.'
)
_HELP = (
    'Give ctx.prepare what has a state, keep numbers in ctx.state, and try it with train.rehearse '
    '(freetrain rehearse, docs/your-script.md)'
)
_NOT_VERIFIED = 'Not verified: the step after {} samples was not computed before.'
_ALL_THE_SAME = "; Reproducible(on_difference='warn') goes on all the same."
_LAST_S = 1.0  # maximum seconds for which the end of a rank waits for its digests


class Verification:
    """Keeps, and compares at a first step, the digests of the step after checkpoints."""

    def __init__(self, parts: RankParts, model: Model, state: LoopState) -> None:
        order, mode = parts.order, parts.order.spec.mode
        self.by_steps = isinstance(mode, Reproducible)
        self._warns = isinstance(mode, Reproducible) and (
            mode.on_difference == 'warn' or mode.warn_only
        )
        self._numbered = not isinstance(mode, Scaled)  # there, a batch depends on the ranks
        self._trainer, self._fragment = order.trainer, order.fragment
        self.rehearsed = order.rehearsed is not None  # then every step is kept
        self._store, self._peers, self._rank = Path(order.store), parts.peers, parts.place.rank
        self._device, self._prepared = parts.device, model.prepared
        self._checkpointer = parts.checkpointer
        self._checkpointer.proves = self._rank == 0
        self._division, self._state = model.division, state
        self._hooks, self._variables = model.hooks, dict[str, Any]()
        self._from, self._path = Position(0, 0, 0, 0, 0, 0), ''
        self._expected: NextStep | None = None
        self._resumes = self._records = self._proves = False
        self._computed, self._settings = False, dict[str, int]()
        known = model.division.whole and isinstance(model.steps, ReproducibleSteps)
        self._steps = cast(ReproducibleSteps, model.steps) if known else None
        self._now: GlobalBatch | None = None
        self._shards = set[str]()  # 'first-last': those of which survivors have kept something
        self._batch: GlobalBatch | None = None  # that is looked at
        self._sums: list[tuple[list[str], torch.Tensor]] = []
        self._writer = Background('digests of the next step')
        self._measures = self._numbered and not (self.by_steps or model.division.pipelined)
        self.looks_ahead = self.by_steps or self._measures
        self._norms, self._squares = dict[str, torch.Tensor](), dict[str, float]()
        self._numbers_before = dict[str, float]()

    @property
    def measures(self) -> bool:
        """Whether this step is measured; then its random numbers depend only on where it is."""
        return self._measures and self._batch is not None

    def loop_begins(self) -> None:
        """Call in ``ctx.loop``, while there are no variables yet that belong to a batch."""
        if not self._variables:
            names = variables(self._hooks.functions)
            self._variables = {name: unknown_state.mark_of(one) for name, one in names.items()}
            sizes = {name: unknown_state.size(one) for name, one in names.items()}
            self._numbers_before = {name: one for name, one in sizes.items() if one}

    def goes_on(self, saved: Source) -> None:
        """The fragment goes on from this state. All ranks call this."""
        there = self._from = saved.position
        self._path = saved.path

        def find() -> str:
            then = self._expected = next_step.read(self._store, there.samples, there.fragment)
            if then is None or then.after is not None:
                return 'step' if then is not None else ''
            return ' '.join(then.parts) or 'state'

        found = self._peers.broadcast_object('next-step', find)
        self._resumes, self._proves = found != '', found == ('step' if self.by_steps else 'state')
        self._shards = set(found.split())
        self._state.resumes, self._state.verified = there.resumes + 1, there.verified
        if '-' in found and self._steps is not None:
            self._steps.looks = True
        elif not (self._proves or self._rank):
            print(_NOT_VERIFIED.format(there.samples))

    def saved(self) -> None:
        """The state is that of a checkpoint: the digests of the next step are kept."""
        self._records = True

    @torch.no_grad()
    def begin(self, batch: GlobalBatch) -> None:
        self._records |= self.rehearsed
        self._now = batch
        if self._resumes or self._records:
            self._batch, self._sums, self._computed = batch, [], False
            self._look(tensors := self._tensors())
            backward.losses = [] if self._measures else None
            self._norms, self._squares = {}, self._squared(tensors)

    @torch.no_grad()
    def gradients(self) -> None:
        if self._batch is None:
            return
        found = {n: t for n, t in self._tensors().items() if n.startswith('parameter')}
        if self.by_steps:
            self._look(found, grad=True)
        elif self._measures and not self._rank:
            self._norms = {n: _norm(t.grad) for n, t in found.items() if t.grad is not None}

    @torch.no_grad()
    def end(self) -> None:
        self._computed = self._batch is not None
        if self._computed and self._measures:
            now = self._squared(self._tensors())
            self._squares = {n: one - self._squares.get(n, 0.0) for n, one in now.items()}
        if self._computed and self.by_steps:
            self._look(self._tensors())
            self._settings = {
                f'the settings of optimizer {i} (learning rate)': zlib.crc32(repr(now).encode())
                for i, now in enumerate(map(settings_of, self._prepared.optimizers), 1)
                if self._division.whole
            }

    def conclude(self) -> None:
        """Call after a global batch, on all ranks. Raises BadInput if it is not as before."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if self._computed and self.by_steps:
            self._state.reports.gather(self._peers)
        resumes, records, parts = self._resumes, self._records, dict[str, dict[str, int]]()
        self._resumes = self._records = False
        if resumes and self._steps is not None and self._steps.looks:
            self._steps.looks = False
            parts = dict(ChainMap(*gather(self._peers, self._digests())))
            self._proves = not self._shards.isdisjoint(parts)
            if not (self._proves or self._rank):
                print(_NOT_VERIFIED.format(batch.samples_before))
        self._state.verified += resumes and self._proves
        state, *step = self._read()
        losses, backward.losses = backward.losses or [], None
        if self._rank:
            return
        now = NextStep(
            computes_as(self._device),
            self._numbers(batch),
            state,
            step[0] if len(step) > 1 else None,  # a step that is skipped has none
            {**step[-1], **self._settings} if step else None,
            dict(self._state.metrics) if step else {},
            parts,
            self._measured(losses) if self._measures and self._computed else None,
            self._numbers_before,
        )
        if records:
            where = self._store, batch.samples_before, self._fragment
            write = partial(next_step.write, *where, now, all_kept=self.rehearsed)
            self._writer.start(write, self._checkpointer.proof.set)
        if resumes and self._expected is not None:
            self._compare(self._expected, now)

    def lost(self, samples: int) -> None:
        """Another rank was lost after so many samples: what this one has of the step is kept."""
        batch, parts = self._now, self._digests()
        if batch is not None and batch.samples_before == samples and parts:
            step = NextStep(computes_as(self._device), self._numbers(batch), {}, parts=parts)
            where = self._store, samples, self._fragment
            self._writer.start(partial(next_step.write, *where, step, f'-{self._rank}'))
            self._writer.wait(_LAST_S)

    def settle(self) -> None:
        self._writer.wait()

    def _numbers(self, batch: GlobalBatch) -> int:
        numbers = ','.join(map(str, batch.indices)) if self._numbered else ''
        return zlib.crc32(numbers.encode())

    def _squared(self, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
        """The norms of parameters; where it can be read at once."""
        looks = self._measures and not self._rank and self._device.type == 'cpu'
        own = [name for name in tensors if name.startswith('parameter')] if looks else ()
        return {name: float(_norm(tensors[name])) ** 2 for name in own}

    def _measured(self, losses: list[torch.Tensor]) -> Measured:
        groups = [group for one in self._prepared.optimizers for group in one.param_groups]
        values = [*losses, *self._norms.values()]
        found = torch.stack([one.to(self._device) for one in values]).tolist() if values else []
        cpu, fixed = self._device.type == 'cpu', torch.are_deterministic_algorithms_enabled()
        ranks, parts = self._peers.world_size, self._division.parts
        return Measured(
            [ranks, int(cpu), int(fixed), parts, torch.get_num_threads(), _processor()],
            math.fsum(found[: len(losses)]),
            dict(zip(self._norms, found[len(losses) :], strict=True)),
            self._squares,
            [float(group['lr']) for group in groups if 'lr' in group],
        )

    def _digests(self) -> dict[str, dict[str, int]]:
        names = {id(tensor): name for name, tensor in self._tensors().items()}
        found = self._steps.digests() if self._steps is not None else {}
        return {
            f'{first}-{last}': {names[i]: one for i, one in sums.items()}
            for (first, last), sums in found.items()
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and the buffers that are saved, by names for a sentence."""
        found = {f'parameter {name}': one for name, one in self._prepared.called()}
        for i, model in enumerate(self._prepared.models, 1):
            saved = model.state_dict(keep_vars=True)
            of = f' of model {i}' if len(self._prepared.models) > 1 else ''
            found.update((f'buffer {n!r}{of}', b) for n, b in model.named_buffers() if n in saved)
        return found

    def _look(self, tensors: dict[str, torch.Tensor], *, grad: bool = False) -> None:
        """Sum up the bits, on the ranks that have a share in it."""
        whole = self._division.whole
        if (whole and self._rank) or self._division.pipelined:
            return

        def share(tensor: torch.Tensor) -> torch.Tensor | None:
            # Of ranks that hold the same part, one counts.
            if not whole and self._rank != (
                holders(tensor, self._division.mesh)[0] if is_divided(tensor) else 0
            ):
                return None
            value = tensor.grad if grad else tensor
            return None if value is None else local(value)

        sums = bit_sums([share(tensor) for tensor in tensors.values()], self._device)
        self._sums.append((list(tensors), sums))

    def _read(self) -> list[dict[str, int]]:
        if not self._sums:
            return [{}]
        row = torch.cat([sums for _, sums in self._sums])
        if not self._division.whole:
            row = self._peers.all_gather(row).sum(0) & MODULO
        values = iter(row.tolist())
        return [dict(zip(names, values, strict=False)) for names, _ in self._sums]

    def _compare(self, then: NextStep, now: NextStep) -> None:
        what, other = difference(then, now), then.device != now.device
        measured, before = now.measured, then.measured
        softly = measured is not None and before is not None and what == measured.difference(before)
        if not what:
            for name in then.reports.keys() & now.reports.keys() if now.after else ():
                if repr(then.reports[name]) != repr(now.reports[name]):
                    print(
                        f'In the first step, ctx.report was given {name}={now.reports[name]}, '
                        f'before it was {then.reports[name]}; what is trained is the same.'
                    )
            return
        known = [*chain(*vars(self._prepared).values()), *self._prepared.tensors()]
        known += [each for model in self._prepared.models for each in model.modules()]
        found = unknown_state.unknown(variables(self._hooks.functions), known, self._variables)
        both = then.numbers.keys() & now.numbers.keys()
        sizes = [(name, then.numbers[name], now.numbers[name]) for name in sorted(both)]
        made = [f'{name} was {one:.7g} and is {two:.7g}' for name, one, two in sizes if one != two]
        sentence = (
            f'Trainer {self._trainer!r}: fragment {self._fragment} does not continue what fragment '
            f'{self._from.fragment} began: after {self._from.samples} samples (checkpoint '
            f'{self._path}), {what}. '
            + (f'It computes on {now.device}, and before on {then.device}. ' if other else '')
            + (f'Before the loop, {", ".join(made[:6])}: see ctx.once. ' if made else '')
            + (unknown_state.sentence(found) or _NOTHING_FOUND)
            + f' {_HELP}{_ALL_THE_SAME if self.by_steps else "; it goes on."}'
        )
        if not (self._warns or other or softly):
            self.settle()
            error = BadInput(sentence)
            error.final = True
            raise error
        self._state.verified -= self._proves
        print(sentence, file=sys.stderr)


@cache
def _processor() -> int:
    with suppress(OSError), Path('/proc/cpuinfo').open('rb') as file:
        return zlib.crc32(next((line for line in file if line.startswith(b'model name')), b''))
    return 0


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    kind = torch.float64 if tensor.device.type == 'cpu' else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(as_plain(local(tensor)), dtype=kind)
    return norm

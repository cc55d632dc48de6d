"""How far a fragment's training is, and its metrics: means over global batches, of all ranks."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from typing import Any

import msgspec

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.state import Source
from parsl_freetrain.training.comm.peers import Peers, gather, gather_bytes
from parsl_freetrain.training.spec.retention import BEST
from parsl_freetrain.training.steps.notes import mean

_Parts = dict[str, tuple[int, list[tuple[float, float]]]]
"""By metric: samples at the end of a global batch, and its parts as (weight, value)."""


class Reports:
    """What was given to ``ctx.report``; in the body, exact means over a batch. ``values``: the
    last.
    """

    def __init__(self, values: dict[str, float], sums: Mapping[str, Sequence[Any]] = {}) -> None:
        self.values, self.means = values, EpochMeans(sums)
        self._reached = 0
        self._parts: _Parts = {}
        self._micro_batch: dict[str, float] | None = None

    def put(self, name: str, value: float) -> None:
        """Report a value; in a micro-batch, the last value of each name counts."""
        if self._micro_batch is not None:
            self._micro_batch[name] = value
        else:
            self.values[name] = value
            self._parts.pop(name, None)

    def put_all(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                self.put(name, float(value))
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise TypeError(
                    f'ctx.report was given {name}={value!r}, a {type(value).__name__}; '
                    'it takes numbers, as of float.'
                ) from None

    @property
    def in_micro_batch(self) -> bool:
        return self._micro_batch is not None

    def begin_micro_batch(self, reached: int) -> None:
        self._reached, self._micro_batch = reached, {}

    def end_micro_batch(self, weight: float, samples: int = 0) -> None:
        micro_batch, self._micro_batch = self._micro_batch or {}, None
        self.means.add(micro_batch, samples if weight else 0)
        for name, value in micro_batch.items():
            if weight:
                at, parts = self._parts.get(name, (0, []))
                if at != self._reached:
                    self._parts[name] = self._reached, parts = self._reached, []
                parts.append((weight, value))

    def gather(self, peers: Peers) -> None:
        """Set each value to its mean over the last batch with it. All ranks call this."""
        said = gather_bytes(peers, msgspec.msgpack.encode(self._parts) if self._parts else b'')
        for packed in (one for rank, one in enumerate(said) if rank != peers.rank and one):
            for name, (at, parts) in msgspec.msgpack.decode(packed, type=_Parts).items():
                newest, known = self._parts.get(name, (0, []))
                if at > newest:
                    self._parts[name] = at, list(parts)
                elif at == newest:
                    known.extend(parts)
        for name, (_, parts) in self._parts.items():
            self.values[name] = mean(parts)
        self._parts = {}

    def share(self, peers: Peers) -> None:
        """Take the values of rank 0, which alone knows those of the checkpoint. All call this."""
        self.values.update(gather(peers, self.values)[0])

    def forget(self) -> None:
        """Forget what was reported and not gathered, since training goes back."""
        self._parts, self._micro_batch = {}, None


class EpochMeans:
    """Exact means over an epoch of the body's reports; ``values``: the last epoch's."""

    def __init__(self, saved: Mapping[str, Sequence[Any]]) -> None:
        self.used, self.values = False, dict[str, float]()
        self._sums = {name: (Fraction(total), int(n)) for name, (total, n) in saved.items()}

    @property
    def sums(self) -> dict[str, list[Any]]:
        return {name: [str(total), samples] for name, (total, samples) in self._sums.items()}

    def add(self, metrics: Mapping[str, float], samples: int) -> None:
        for name, value in metrics.items() if self.used and samples else ():
            total, before = self._sums.get(name, (Fraction(0), 0))
            if math.isfinite(value):
                self._sums[name] = total + Fraction(value) * samples, before + samples

    def gather(self, peers: Peers) -> None:
        """Have all sums on rank 0, which saves them. All ranks call this."""
        totals: dict[str, tuple[Fraction, int]] = {}
        for said in gather(peers, self.sums):
            for name, (total, samples) in said.items():
                before, count = totals.get(name, (Fraction(0), 0))
                totals[name] = before + Fraction(total), count + samples
        self.values = {name: float(total / count) for name, (total, count) in totals.items()}
        self._sums = totals if peers.rank == 0 else {}

    def end_epoch(self) -> None:
        self._sums = {}


class FragmentEnd(BaseException):
    """Ends the user's function when the fragment stops before the total; the state is saved."""


class Phase(Enum):
    TRAINING = auto()
    EPOCH_END = auto()  # what is done at the end of an epoch is being done
    LOOP_ENDED = auto()
    ENDED_EARLY = auto()  # all ranks have agreed to end the training before the total
    FINISHED = auto()  # the function has returned, in this or an earlier fragment
    STOPPED = auto()  # the fragment ended before the total


@dataclass
class UserState:
    """The user's own dict; ``used``: whether this fragment has used it."""

    values: dict[str, Any] = field(default_factory=dict)
    used: bool = False

    def put_back(self, values: dict[str, Any]) -> None:
        self.values.clear()
        self.values.update(values)

    def text(self) -> str:
        try:
            return json.dumps(self.values)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f'ctx.state cannot be saved ({error}): keep texts, numbers, lists and dicts in it.'
            ) from error


@dataclass
class LoopState:
    """The progress of training; ``reached``: at the end of the current batch, of ``epoch``."""

    samples: int
    total_samples: int | None  # not known yet
    reached: int
    reports: Reports
    user: UserState
    epoch: int = 0
    phase: Phase = Phase.TRAINING
    epoch_due: bool = False  # what is done at the end of an epoch is still to be done
    finishing: str = ''  # why the training is to end before the total; empty: it is not
    wanted: dict[str, float] | None = None  # metrics of a checkpoint at the end of this epoch
    result: str = ''  # what the function has returned, as JSON
    resumes: int = 0  # as of Position
    verified: int = 0
    round_ended: int = 0
    round_from: str = ''  # as of Position
    between_epochs_s: float = math.inf  # that the function took between two loops of ctx.epochs
    round_begins: bool = False  # with new weights, which no checkpoint has yet

    @classmethod
    def at_start(
        cls, saved: Source | None, last: Checkpoint | None, total_samples: int | None
    ) -> 'LoopState':
        """That of the state it continues from. ``last``: the newest checkpoint, on rank 0."""
        known = dict(last.metrics) if last is not None else {}
        known.pop(BEST, None)  # it belongs to the checkpoints for which ctx.checkpoint was called
        if saved is None:
            return cls(0, total_samples, 0, Reports(known), UserState())
        there = saved.position
        return cls(
            there.samples,
            there.total_samples if total_samples is None else total_samples,
            there.samples,
            Reports(known, there.means),
            UserState(dict(there.user)),
            there.epoch,
            finishing=there.finishing,
            round_begins=bool(there.round_ended),
        )

    @property
    def loop_over(self) -> bool:
        return self.phase in (Phase.LOOP_ENDED, Phase.ENDED_EARLY)

    @property
    def metrics(self) -> dict[str, float]:
        return self.reports.values

    def count(self, what: str) -> None:
        self.metrics[what] = self.metrics.get(what, 0.0) + 1

    def want_checkpoint(self, best: float | None) -> None:
        """Want a checkpoint at the end of this epoch. Raises BadInput if it is not its end."""
        if self.phase is not Phase.EPOCH_END:
            raise BadInput(
                'ctx.checkpoint was called outside of the end of an epoch: call it in a function '
                'that is given to ctx.each_epoch, or within ctx.epochs() behind ctx.loop.'
            )
        self.wanted = {} if best is None else {BEST: float(best)}


def plain_text(value: object) -> str:
    """A value as JSON, tensors of one number as numbers; '' for None. Raises BadInput otherwise."""
    try:
        return '' if value is None else json.dumps(value, default=_number)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f'The function returned a {type(value).__name__} that cannot be kept as the result of '
            f'the training ({error}): return numbers, texts, and lists and dicts of them; the '
            'trained models are in the checkpoint.'
        ) from error


def _number(value: Any) -> Any:
    if hasattr(value, 'item') and getattr(value, 'ndim', 0) == 0:
        return value.item()
    raise TypeError(f'it has a {type(value).__name__} in it')

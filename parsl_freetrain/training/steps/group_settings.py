"""Settings of optimizers' parameter groups, as learning rates: equal in micro-batches and ranks."""

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers, gather

_Groups = list[list[dict[str, Any]]]  # by optimizer and group, the settings that are plain values

_SCALARS = (bool, int, float, str, type(None))
_OFFER = (
    'What is computed from a loss or from samples in the body of ctx.loop belongs to a part of the '
    'global batch there. Set it in ctx.before_step(fn), ctx.after_step(fn) or ctx.each_epoch(fn), '
    'from ctx.samples or ctx.metrics'
)


class GroupSettings:
    """Compares optimizers' settings in all micro-batches and on all ranks."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._first: _Groups | None = None
        self._before: _Groups = []
        self._at_step: dict[int, list[dict[str, Any]]] = {}
        self.history = 0

    def now(self) -> _Groups:
        return [settings_of(optimizer) for optimizer in self._optimizers]

    def digest(self) -> bytes:
        return hashlib.blake2b(repr(self.now()).encode(), digest_size=8).digest()

    def follow_steps(self) -> None:
        """From now on, :attr:`history` tells of every step of the optimizers."""

        def follow(number: int) -> Callable[..., None]:
            def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
                text = repr((number, settings_of(optimizer)))
                self.history = zlib.crc32(text.encode(), self.history)

            return note

        for number, optimizer in enumerate(self._optimizers):
            optimizer.register_step_pre_hook(follow(number))

    def begin_batch(self) -> None:
        self._first, self._before = None, self.now()

    def begin_micro_batch(self) -> None:
        self._at_step = {}
        if self._first is not None and self._first != self._before:
            self._take(self._before)

    def wants_step(self, number: int) -> None:
        """Call when the body asks for a step, which is taken after the micro-batches."""
        self._at_step[number] = settings_of(self._optimizers[number])

    def end_micro_batch(self) -> None:
        """BadInput if it changed settings after a step, or otherwise than one before."""
        now = self.now()
        for number, then in self._at_step.items():
            if then != now[number] and repr(then) != repr(now[number]):
                group, key, old, new = _first_difference([then], [now[number]])[1:]
                raise BadInput(
                    f'The body of ctx.loop changed {key!r} in parameter group {group} of optimizer '
                    f'{number + 1} from {old!r} to {new!r} after optimizer.step(). In reproducible '
                    'mode the step is taken after the body has run for all virtual shards: change '
                    'it before optimizer.step(), or in ctx.after_step(fn).'
                )
        if self._first is None:
            self._first = now
        elif now != self._first and repr(now) != repr(self._first):
            number, group, key, old, new = _first_difference(self._first, now)
            raise BadInput(
                f'The body of ctx.loop set {key!r} in parameter group {group} of optimizer '
                f'{number + 1} to {old!r} for one virtual shard of a global batch and to {new!r} '
                f'for another, so the result would depend on the number of nodes. {_OFFER}.'
            )

    def agree(self, peers: Peers, *, in_micro_batches: bool = True) -> None:
        """Compare on all ranks, whatever had micro-batches; BadInput on all if they differ."""
        mine, own = self.now(), self._first is not None or not in_micro_batches
        found = gather(peers, (own, mine), tuple[bool, _Groups])
        having = [(rank, theirs) for rank, (had, theirs) in enumerate(found) if had]
        first, settings = having[0]
        for rank, theirs in having[1:]:
            if repr(theirs) != repr(settings):
                number, group, key, old, new = _first_difference(settings, theirs)
                raise BadInput(
                    f'The ranks have different values of {key!r} in parameter group {group} of '
                    f'optimizer {number + 1}: {old!r} on rank {first} and {new!r} on rank {rank}, '
                    f'so each would train another model. {_OFFER}.'
                )
        if not own:
            self._take(settings)

    def refuse(self, peers: Peers) -> None:
        """Call on all ranks when :attr:`history` differs; raises BadInput."""
        self.agree(peers, in_micro_batches=False)
        raise BadInput(
            'The ranks have taken different numbers of steps, or steps with different settings of '
            'an optimizer (a learning rate that was put back since), so each trains another model. '
            f'{_OFFER}.'
        )

    @torch.no_grad()
    def _take(self, settings: _Groups) -> None:
        for optimizer, groups in zip(self._optimizers, settings, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for key, value in values.items():
                    old = group.get(key)
                    if isinstance(old, torch.Tensor):
                        old.copy_(torch.tensor(value))
                    else:
                        group[key] = tuple(value) if isinstance(old, tuple) else value


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [plain_values(group) for group in optimizer.param_groups]


def plain_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts, tensors of numbers, and lists of these, without the 'params' of a group."""
    return {
        key: value if type(value) in _SCALARS else _plain(value)
        for key, value in given.items()
        if type(value) in _SCALARS or (key != 'params' and _is_plain(value))
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return isinstance(value, (*_SCALARS, torch.Tensor))


def _plain(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return float(value) if isinstance(value, float) else value  # numpy's are floats too


def _first_difference(one: _Groups, other: _Groups) -> tuple[int, int, str, Any, Any]:
    """Number of the optimizer and of the group, the key, and both values."""
    for number, (groups, others) in enumerate(zip(one, other, strict=True)):
        if len(groups) != len(others):
            return number, 0, 'number of groups', len(groups), len(others)
        for group, (values, theirs) in enumerate(zip(groups, others, strict=True)):
            for key in (*values, *theirs):
                if repr(values.get(key)) != repr(theirs.get(key)):
                    return number, group, key, values.get(key), theirs.get(key)
    return 0, 0, '', None, None

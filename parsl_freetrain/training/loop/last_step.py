"""The state at the end of the last global batch, to go on from if a rank is lost in the next."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint import transport_memory
from parsl_freetrain.training.checkpoint.block_digests import digest_of_blocks
from parsl_freetrain.training.checkpoint.fault_hooks import saving
from parsl_freetrain.training.checkpoint.flatten import same
from parsl_freetrain.training.checkpoint.local_shard import local
from parsl_freetrain.training.checkpoint.parts import contents_of, file_of
from parsl_freetrain.training.checkpoint.state import Source, State
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.peers import Peers, on_any_rank
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.loop.save_timing import AHEAD_S
from parsl_freetrain.training.spec.fork_messages import OfferState
from parsl_freetrain.training.spec.messages import LeavingState, StateLeft
from parsl_freetrain.training.steps.bit_sums import bit_sums
from parsl_freetrain.training.steps.buffers import copy_all, plain_buffers


@dataclass(frozen=True)
class Surroundings:
    """What a batch may change before its optimizers step, or the end of an epoch, as it was."""

    samples: int
    epoch_due: bool
    finishing: str
    user: str
    values: dict[str, Any]
    groups: list[list[dict[str, Any]]]  # settings of optimizers
    states: list[tuple[Any, dict[str, Any]]]  # of schedulers, scalers, averages of models
    buffers: list[torch.Tensor]
    versions: list[int]
    variables: dict[str, Any] | None = None  # of the function; None: not copied
    settings: dict[str, Any] | None = None  # of modules
    bits: list[int] | None = None  # of parameters and optimizers; None: not looked at

    def put_back(self, state: LoopState, prepared: Prepared) -> bool:
        """False: there are other buffers now, which were left as they are."""
        # Not by its text, in which keys are strings and tuples are lists.
        state.user.put_back(copy.deepcopy(self.values))
        for optimizer, groups in zip(prepared.optimizers, self.groups, strict=True):
            del optimizer.param_groups[len(groups) :]  # those that were added since
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        for thing, its in self.states:
            thing.load_state_dict(its)
        buffers = _buffers(prepared)
        if alike := [one.shape for one in self.buffers] == [one.shape for one in buffers]:
            copy_all(buffers, self.buffers)
        return alike


class LastStep:
    """Knows whether models still are as at the end of a global batch (PyTorch counts changes of
    tensors, except those of ``parameter.data``), and puts back what surrounds them. ``possible``: a
    rank can tell, and others hold what is lost (a failed exchange raises before its result is used:
    gloo). ``needs``: samples of the last checkpoint that the user has asked for; 0: none.
    """

    def __init__(self, parts: RankParts, model: Model, state: LoopState) -> None:
        self._parts, self._model, self._state = parts, model, state
        self.possible = model.division.copies > 1 and parts.peers.exchanges_on_cpu
        self.needs = 0
        self._end: Surroundings | None = None
        self._in_batch = False

    @property
    def knows_all(self) -> bool:
        """Whether this rank has rank 0's ctx.state and variables, which may differ."""
        return self._parts.place.rank == 0 or not self._uses_state

    @property
    def _uses_state(self) -> bool:
        kept = {**(self.variables or {}), **dict.fromkeys(('counts', 'here', 'ids'))}  # of any rank
        used = self._state.user.used or any(kept.values())
        return used or (self._end is not None and self._end.user != '{}')

    @property
    def variables(self) -> dict[str, Any] | None:
        return self._end.variables if self._end is not None else None

    @property
    def settings(self) -> dict[str, Any]:
        return (self._end.settings if self._end is not None else None) or {}

    @property
    def goes_on(self) -> bool:
        """Whether a short step follows in the same epoch, as far as is known."""
        short = self._parts.checkpointer.timing.expected_step_s <= AHEAD_S
        return short and self._end is not None and not self._end.epoch_due

    def begin_batch(self) -> None:
        self._in_batch = True

    @torch.no_grad()
    def end_batch(self, *, of_loop: bool = False) -> None:
        """Call after a global batch and before the first. ``of_loop``: it is the loop's last."""
        self._end, self._in_batch = None, False
        if not self.possible or of_loop:
            return
        with suppress(BadInput):  # the next checkpoint says that there is no text
            variables = self._model.carried.copied()  # the next batch may change them at once
            settings = self._model.modules.changed_settings()
            end = around_models(self._state, self._model.prepared)
            self._end = replace(end, variables=variables, settings=settings)

    def forget(self) -> None:
        """The state is none to go on from: the loop is over, or training goes back."""
        self._end = None

    def leave(self, state: Callable[[], State]) -> StateLeft | None:
        """After a loss: leave the last batch's state on this node; None: it cannot, or need not."""
        if not self._put_back() or self._model.watch.spoilt():
            return None
        order, rank, samples = self._parts.order, self._parts.place.rank, self._state.samples
        part, parts = self._model.division.part
        alone = rank == 0 and self._uses_state  # no other rank has what is not a tensor
        offer = OfferState(order.trainer, order.fragment, samples, part, alone)
        if samples <= order.samples or not transport_memory.is_wanted(offer):
            return None
        self._parts.channel.send(LeavingState())
        saving('leaving')
        memory = transport_memory.NodeMemory(order.trainer, offer=offer)
        snapshots = transport_memory.Snapshots()
        taken = snapshots.take(state())
        assert taken.image is not None
        contents = transport_memory.image_of(taken.part(rank).packed)
        with suppress(OSError):
            if memory.put(file_of(rank), taken.image) and memory.put(contents_of(rank), contents):
                digest = digest_of_blocks(contents.blocks)
                return StateLeft(digest, samples, True, self.needs, part, parts)
        return None

    def _put_back(self) -> bool:
        end, prepared = self._end, self._model.prepared
        if end is None or end.variables is None or (self._in_batch and self._model.steps.changed):
            return False
        if not self.knows_all and self._model.division.whole:
            return False
        if end.versions != versions(prepared, averages=True):
            return False
        state = self._state
        state.samples, state.epoch_due, state.finishing = end.samples, end.epoch_due, end.finishing
        return end.put_back(state, prepared)


def around_models(
    state: LoopState, prepared: Prepared, *, averages: bool = False, bits: bool = False
) -> Surroundings:
    """What surrounds the models now; raises BadInput if ctx.state cannot be saved."""
    buffers = _buffers(prepared)
    kept = [torch.empty_like(buffer) for buffer in buffers]
    copy_all(kept, buffers)
    things = (*prepared.schedulers, *prepared.scalers, *(prepared.averages if averages else ()))
    return Surroundings(
        state.samples,
        state.epoch_due,
        state.finishing,
        state.user.text(),
        copy.deepcopy(state.user.values),
        [
            [{k: copy.deepcopy(v) for k, v in g.items() if k != 'params'} for g in one.param_groups]
            for one in prepared.optimizers
        ],
        [(thing, copy.deepcopy(thing.state_dict())) for thing in things],
        kept,
        versions(prepared, averages=True),
        bits=_bits(prepared) if bits else None,
    )


def _bits(prepared: Prepared) -> list[int]:
    """Of parameters and optimizers: they show changes of ``parameter.data``, too."""
    states = [[*one.state.values()] for one in prepared.optimizers]
    held = tree_leaves(([one for _, one in prepared.named_parameters()], states))
    tensors = [local(one) for one in held if isinstance(one, torch.Tensor)]
    plain = [one for one in tensors if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return bit_sums(plain, plain[0].device).tolist() if plain else []


def put_back_changes(
    before: Surroundings, state: LoopState, model: Model, saved: Source, peers: Peers
) -> None:
    """Undo the function's changes since ``before``: a fragment has repeated them."""
    now, prepared = around_models(state, model.prepared, bits=True), model.prepared
    kinds = 'bits', 'buffers', 'groups', 'states', 'versions'
    if on_any_rank(peers, not all(same(getattr(before, k), getattr(now, k)) for k in kinds)):
        print('What the function changed again before ctx.loop is put back.')
        model.division.restore(prepared, saved.load(prepared))
        if on_any_rank(peers, _bits(prepared) != before.bits):  # it may share memory with ``saved``
            raise BadInput(
                'Between ctx.prepare and ctx.loop, the function changes tensors of an optimizer, '
                'and each fragment would do so again: do it only where training begins, in '
                '"if not ctx.samples:", or at the end of an epoch, in ctx.each_epoch(fn).'
            )


def _buffers(prepared: Prepared) -> list[torch.Tensor]:
    return [buffer for model in prepared.models for buffer in plain_buffers(model)]


def versions(prepared: Prepared, *, averages: bool = False) -> list[int]:
    own = [parameter for _, parameter in prepared.named_parameters()]
    if averages:
        own += [parameter for model in prepared.averages for parameter in model.parameters()]
    return [parameter._version for parameter in own if not parameter.is_inference()]

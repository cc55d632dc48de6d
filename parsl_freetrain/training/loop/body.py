"""Looks at the first iterations of the user's loop for what would be lost or trained wrongly."""

import dis
import gc
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from inspect import CO_GENERATOR
from itertools import groupby, takewhile
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.inside import parts_of
from parsl_freetrain.training.data.stream import is_stream
from parsl_freetrain.training.loop.caches import Caches
from parsl_freetrain.training.loop.changes import has_own_state, is_library, is_package
from parsl_freetrain.training.loop.held import ITEMS
from parsl_freetrain.training.loop.loop_data import LoopCall
from parsl_freetrain.training.loop.loss import refuse_wrong
from parsl_freetrain.training.loop.numbers import Numbers
from parsl_freetrain.training.loop.places import variables
from parsl_freetrain.training.loop.rank_parts import LoopHooks
from parsl_freetrain.training.loop.spaces import Space
from parsl_freetrain.training.loop.unknown_state import among, frame_around, frames
from parsl_freetrain.training.spec.mode import ADASUM, ROLLBACK, Reproducible
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.steps import backward
from parsl_freetrain.training.steps.gradient_guard import unreadable
from parsl_freetrain.training.steps.mesh import Division

_OURS, _LOOKED_AT = 'parsl_freetrain', 4  # the last: global batches
_VARIABLES = tuple(
    f'{do}_{what}' for do in ('LOAD', 'STORE') for what in ('FAST', 'DEREF', 'GLOBAL')
)
_GOES_ON = (
    '{} goes from one batch to the next in the body of ctx.loop, which runs once for each virtual '
    'shard, or on each rank with samples of its own: the result would depend on the nodes. Begin '
    'each batch anew, or make what is carried on a part of the samples; what has as many rows by '
    'chance (prototypes), a buffer of a model. With max_nodes=1 and shards=1 it is kept as it is.'
)
NEVER_STEPPED = (
    'ctx.loop ended without a single optimizer.step(), so nothing was trained: call '
    'loss.backward() and optimizer.step() in it, with the optimizer that ctx.prepare returned.'
)
TRAINED_WITHOUT_STEP = (
    'The body of ctx.loop trained without optimizer.step(), by which steps are counted: call it in '
    'every iteration, with a closure where an optimizer passes several times (SAM: step(closure) '
    'in place of first_step and second_step).'
)


def has_whole_models(spec: TrainingSpec, division: Division, peers: Peers) -> bool:
    """Whether each rank trains whole models with its own samples, whose mean is taken."""
    adasum = getattr(spec.mode, 'combine', None) == ADASUM
    return not (spec.sharded or adasum) and division.shape.data == peers.world_size


def parts_of_batch(spec: TrainingSpec) -> int:
    """How many a global batch may have, each for one pass of the body."""
    ranks = spec.max_nodes * (spec.ranks.per_node or 1)
    return spec.shards if isinstance(spec.mode, Reproducible) else ranks


def asks_for_means(hooks: LoopHooks, spec: TrainingSpec) -> bool:
    """Whether the function around us, or one in its variables or hooks, has ctx.epoch_means."""
    frame = frame_around()
    functions = *hooks.functions, *variables().values()
    # Others may have a ``__getattr__`` that raises anything.
    plain = [one.__func__ if isinstance(one, MethodType) else one for one in functions]
    codes: list[Any] = [frame and frame.f_code]
    codes += [one.__code__ for one in plain if isinstance(one, FunctionType)]
    for code in codes:
        if isinstance(code, CodeType):
            codes += code.co_consts
            if 'epoch_means' in code.co_names:
                if spec.mode.on_nan == ROLLBACK:
                    raise BadInput("ctx.epoch_means cannot go back, as on_nan='rollback' may.")
                return True
    return False


class Body:
    """The body of one loop, of ``call``. ``anew``: it begins here."""

    def __init__(
        self, spec: TrainingSpec, division: Division, peers: Peers, anew: bool, call: LoopCall
    ) -> None:
        parts = parts_of_batch(spec)
        # DDP waits in each backward pass, if not here, then on other nodes.
        several = max(parts, peers.world_size) > 1
        self._together = several and not isinstance(spec.mode, Reproducible)
        looks = call.loss in (None, 'sum') and parts > 1
        self._looks, self._loss = looks and has_whole_models(spec, division, peers), call.loss
        self._seen = False  # a loss that is not 0
        self._divided, self._goes_on = parts > 1, dict[str, Any]()
        self._anew, self._around = anew, frame_around()
        self._own = not (self._around and _OURS in self._around.f_globals.get('__name__', ''))
        self._asked: tuple[FrameType | None, int] | None = None
        self._iterations = self._before = self.batches = 0  # the last: global ones
        self._shared, self._fixed = list[Space](), dict[int, Any]()
        self._show: Callable[[], object] = dict  # what is hidden is there again
        # A stream's workers run for as long as it is held.
        self._data = None if is_stream(call.data.dataset) else call.data.dataset
        self._read = self._loaders()
        self._refuse_loaders()
        backward.watch()

    def look(self, numbers: Numbers | None, caches: Caches) -> None:
        """Call where a loop begins: what is there now was left by no batch of it."""
        for one in (frame.f_locals.get('self') for frame in frames()):
            if is_package(type(one)) and has_own_state(one):  # type: ignore[arg-type]
                raise BadInput(
                    f'ctx.loop is run by a {type(one).__name__} of {type(one).__module__}, whose '
                    'state counts passes, of which a rank has several in a global batch: write '
                    '"for batch in ctx.loop(...):" yourself, and call there what it calls.'
                )
        self._shared = [] if numbers is None else numbers.shared
        self._caches = dict.fromkeys((2, 8), caches)  # by number of the global batch
        ones = [one for *_, parts in values_in(self._shared) for one in parts]
        self._fixed = {id(one): one for one in ones if isinstance(one, torch.Tensor)}

    def begin(self, data: Any, samples: int) -> None:
        self._before, self._iterations = backward.calls, self._iterations + 1
        first = self._iterations == 1
        if self._around is not None and self._divided:
            self._look_at_what_goes_on(self._around)
        if self._divided and 1 < self.batches <= _LOOKED_AT:
            self._show = hidden(self._shared, self._fixed, samples)
        looks = self._looks and (first or not self._seen)
        backward.looking = partial(self._look_at_loss, data) if looks else None
        # A collate function may have left all samples out.
        holds = data is not None and not (hasattr(data, '__len__') and len(data) == 0)
        self._asked = _asker() if first and self._anew and holds else None

    def end(self, data: Any, stepped: bool) -> None:
        """Raises BadInput if the batch was not used, or a variable would be lost."""
        backward.looking = None
        if caches := self._caches.pop(self.batches, None):
            caches.look()
        self._show()
        self._show = dict
        trained = backward.calls > self._before
        if self._together and not trained:
            raise BadInput(
                'An iteration of ctx.loop ended without backward() on this rank, for which other '
                'ranks wait: train every batch, with a loss times 0 where it is to be '
                'skipped, and leave samples out by a sampler or in the dataset.'
            )
        asked, self._asked = self._asked, None
        left_out = asked is not None and asked == _asker() and _has(asked[0], data)
        if asked and not (trained or stepped or left_out):
            raise BadInput(
                'ctx.loop was asked for the next batch before the first one was trained, by '
                'backward() and optimizer.step(). If something looks ahead in it, leave that out, '
                'as a batch would be lost at each stop (DataLoader workers load ahead: num_workers)'
                '; leave samples out by a sampler or in the dataset.'
            )
        if self._around is not None and self._iterations > 1 and self.batches > 1:
            self._refuse_loaders()
            self._around = self._data = None

    def _loaders(self) -> dict[str, int]:
        """By name: how many batches an iterator over a DataLoader has given."""
        # Models and optimizers know their states, and data have caches.
        known = Dataset, DataLoader, torch.optim.Optimizer
        its = self._around.f_locals if self._around is not None else {}
        names = {name: one for name, one in its.items() if not isinstance(one, known)}
        names |= {f'dataset{at}': one for at, one in parts_of(self._data)}
        found = {name: _given(one) for name, one in among(names, Iterator).items()}  # type: ignore[type-abstract]
        return {name: given for name, given in found.items() if given is not None}

    def _refuse_loaders(self) -> None:
        for name, given in self._loaders().items():
            if not given or given != self._read.get(name):
                raise BadInput(
                    f'{name} reads a DataLoader beside ctx.loop: its position would be lost at the '
                    'end of each fragment, and its order would depend on the nodes. Give ctx.loop '
                    'all DataLoaders: "for (x, y), (u,) in ctx.loop((labelled, unlabelled)):"; '
                    'let a dataset make each sample from its index (no queue of patches).'
                )

    def _look_at_loss(self, batch: Any, loss: Any) -> None:
        if isinstance(loss, torch.Tensor) and not loss.any():
            return  # a sum times 0, of a batch that is left out (no pairs in it)
        self._seen = True
        refuse_wrong(loss, batch, self._loss, own=self._own)

    def _look_at_what_goes_on(self, frame: FrameType) -> None:
        """Raises BadInput if tensors go from an iteration to the next."""
        then, its = self._goes_on, {**frame.f_globals, **frame.f_locals}
        names = _going_on(frame.f_code, frame.f_lasti)
        self._goes_on = {name: its[name] for name in names & its.keys()}
        for name, one in self._goes_on.items() if self._iterations > 1 else ():
            before = then.get(name)
            if _is_data(one) and one is not before:
                raise BadInput(_GOES_ON.format(name))
            if isinstance(one, torch.Tensor) and one is not before:
                print(f'{name} changes in each virtual shard: carry it as a number, by .item().')


def _steps(code: CodeType, at: int = -1) -> list[dis.Instruction]:
    """The instructions of a function, or of its loop whose head is at one of them."""
    steps = [*dis.get_instructions(code)]
    loop = next((one for one in reversed(steps) if one.offset <= at), None)
    if loop is not None and loop.opname == 'FOR_ITER':
        return [one for one in steps if at < one.offset < loop.argval]
    return steps


def _going_on(code: CodeType, at: int) -> set[str]:
    """The variables that a loop reads before it sets them, and not only to add to themselves."""
    first, used, stored = dict[str, bool](), set[str](), set[str]()
    for _, group in groupby(_steps(code, at), lambda s: s.positions and s.positions.lineno):
        steps = [*group]
        of = [s for s in steps if s.opname.startswith(_VARIABLES) and isinstance(s.argval, str)]
        line = [(s.opname.startswith('LOAD'), s.argval) for s in of]
        adds = any(step.opname == 'BINARY_OP' for step in steps)
        to_itself = adds and line and line[0][0] and line[-1] == (False, line[0][1])
        for number, (loads, name) in enumerate(line):
            first.setdefault(name, loads)
            (used if loads else stored).add(name) if number or not to_itself else None
    return {name for name in used & stored if first[name]}


def alone(batches: Iterator[Any]) -> Iterator[Any]:
    """Those of all epochs; BadInput in a ``for`` of a range, which repeats or counts them."""
    # Loops of libraries may end in another way.
    own = takewhile(lambda frame: not is_library(frame.f_code.co_filename), frames())
    for code, at in ((frame.f_code, frame.f_lasti) for frame in own):
        steps: list[Any] = [*dis.get_instructions(code)]
        around = (s for s in steps if s.opname == 'FOR_ITER' and s.offset < at < s.argval)
        heads = {s.positions.lineno for s in around}
        if any(s.argval in ('range', 'trange') and s.positions.lineno in heads for s in steps):
            raise BadInput(
                f'ctx.loop is within a for loop of {code.co_name}, and goes over all epochs '
                'itself: leave out the loop around it, or write that as "for epoch in '
                'ctx.epochs():"; of several parts each states epochs= or samples=.'
            )
    yield from batches


def _asker() -> tuple[FrameType | None, int]:
    """The function, outside of iterators, that asks for a batch, and where in it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_flags & CO_GENERATOR
        or str(frame.f_globals.get('__name__', '')).startswith(_OURS)
    ):
        frame = frame.f_back
    return frame, -1 if frame is None else frame.f_lasti


def _has(frame: FrameType | None, batch: Any) -> bool:
    parts = [batch, *(one for _, one in parts_of(batch) if isinstance(one, torch.Tensor))]
    here = frame.f_locals.values() if frame is not None else ()
    return not {*map(id, parts)}.isdisjoint(map(id, here))


def _given(value: Any, depth: int = 4) -> int | None:
    if isinstance(value, GeneratorType) and f'/{_OURS}/' in value.gi_code.co_filename:
        return None
    if isinstance(value, (_BaseDataLoaderIter, DataLoader)):
        return getattr(value, '_num_yielded', 0)
    if not (isinstance(value, (Iterator, list, tuple)) and depth):
        return None
    inner = [_given(one, depth - 1) for one in gc.get_referents(value)[:64]]
    return max((one for one in inner if one is not None), default=None)


def _is_data(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return bool(np.prod(value.shape) > 1)
    value = [*value.values()] if isinstance(value, dict) else value
    return isinstance(value, (list, tuple)) and any(map(_is_data, value[:16]))


def values_in(spaces: list[Space]) -> list[tuple[Space, Any, Any, list[Any]]]:
    """All there, also in dicts: where, its name, itself, and its parts in a list or tuple."""
    found = [(space, name, value) for space in spaces for name, value in space[0]().items()]
    for one in [one for *_, one in found if isinstance(one, dict) and len(one) <= ITEMS]:
        found += [((partial(dict, one), one.update), key, value) for key, value in one.items()]
    return [(*f, [*f[2]] if type(f[2]) in (list, tuple) else [f[2]]) for f in found]


def hidden(spaces: list[Space], fixed: Collection[int], rows: int) -> Callable[[], object]:
    """What goes from batch to batch where functions share values (a hidden state in an attribute, a
    dict, or a variable of an inner function): what an earlier batch has left, none of ``fixed``,
    with a row for each sample, cannot be read, but it can be replaced, until the answer is called.
    """
    left: list[tuple[Space, Any, Any, Any]] = []
    for space, name, value, parts in values_in(spaces) if rows > 1 else ():
        if any(_has_rows(one, rows) and id(one) not in fixed for one in parts):
            kind = unreadable(_GOES_ON.format(str(name).rpartition('.')[2]))
            new: Any = [o.as_subclass(kind) if _has_rows(o, rows) else o for o in parts]
            left.append((space, name, value, new[0] if parts[0] is value else type(value)(new)))
            space[1]({name: left[-1][-1]})
    return lambda: [
        put({name: old}) for (get, put), name, old, new in left if get().get(name) is new
    ]


def _has_rows(one: Any, rows: int) -> bool:
    """Whether it is shaped as (samples, size) or (layers, samples, size)."""
    if type(one) is not torch.Tensor or one.requires_grad or not one.is_floating_point():
        return False
    return one.layout is torch.strided and not one.is_inference() and rows in one.shape[:-1][:2]

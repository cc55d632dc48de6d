"""The function's variables that change while training goes on; checkpoints hold them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import is_divided
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.loop import changes, places
from parsl_freetrain.training.loop.caches import Caches
from parsl_freetrain.training.loop.changed_data import ChangedData
from parsl_freetrain.training.loop.enumerated import counts, number_of, set_number
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.numbers import Numbers
from parsl_freetrain.training.loop.packing import How, NotPlain, TooLarge, packed, unpacked
from parsl_freetrain.training.loop.unknown_state import frames, set_variables
from parsl_freetrain.training.steps.buffers import is_plain


class Carried:
    """The variables of the functions around a loop, in one fragment; ``saved``: what the checkpoint
    holds (None: training begins). A fragment repeats what is before ``ctx.epochs()`` and
    ``ctx.loop``, so there are two moments: at the beginning of the epoch, and in the loop.
    """

    def __init__(
        self,
        saved: Mapping[str, Any] | None,
        device: torch.device,
        prepared: Prepared,
        *,
        goes_back: bool = False,
    ) -> None:
        self._fresh, self._saved = not saved, dict(saved or {})
        self._frames: list[FrameType] = []
        self._places, self._others = places.Places((), ()), list[Any]()
        self._packages: dict[str, Any] | None = None  # those of the first loop: names must stay
        self._said = set[str]()
        live, models = prepared.tensors(), prepared.models
        now = [*map(id, (*live, *(part for model in models for part in model.modules())))]
        how = How(live, set(), self._class, device, models, now)
        self._how = how.where(self._saved.get('ids', ()))
        self._marks: dict[str, Any] | None = None
        self._at_epoch: dict[str, Any] | None = None
        self._counts: list[Any] = []  # what enumerates a loop
        self._numbers: Numbers | None = None
        self._kept: dict[str, Any] = {}
        self._once: list[Any] = []
        self._went_on = False
        self._ends: list[Any] = []  # by loop, the variables at its end
        self._goes_back = goes_back  # to an earlier checkpoint, perhaps
        self._first: dict[str, Any] = {}  # small ones, where the first loop began
        self._begun: list[int] = []  # what enumerates a loop, where it began
        paths = {path for one in ('epoch', 'loop') for path in self._saved.get(one, ())}
        self._of_data = ChangedData(paths)
        self.caches = Caches(())

    def look(self, known: Sequence[Any], prepared: Prepared, functions: Iterable[Any]) -> None:
        """Call in ``ctx.epochs`` and ``ctx.loop``. ``known``: objects that are saved already, data;
        ``functions``: those that are called around steps.
        """
        data = self._of_data.read(known)
        self._frames = [one for one in frames() if not changes.is_library(one.f_code.co_filename)]
        lambdas = [one for each in prepared.schedulers for one in getattr(each, 'lr_lambdas', ())]
        self._others = [*functions, *prepared.models, *prepared.optimizers, *lambdas, *data]
        self._places = self._found()
        self.caches = Caches(self._places.caches)
        self._how.known = {*map(id, known), *map(id, prepared.averages)}
        self._how.live = prepared.tensors()
        if self._marks is None:
            self._marks = {
                # Behind a cut, it would be a copy of other weights: it is saved, changed or not.
                path: object() if self._fresh and self._is_copy(one) else changes.mark(one)
                for path, one in self._variables(all_of=True)
                if changes.may_be_saved(one) or changes.is_data(one) or isinstance(one, Iterator)
            }

    def _found(self) -> places.Places:
        if self._packages is None:
            self._packages = places.of_packages(self._others)
        found = places.Places(self._frames, self._others, self._of_data.paths)
        return found.with_packages(self._packages)

    def _is_copy(self, one: Any) -> bool:
        """Whether it holds a copy of what is trained (Lookahead, L2-SP, distillation)."""
        if isinstance(one, torch.nn.Module):
            one = [*one.parameters(), *one.buffers()]
        elif changes.is_large(one):
            return False
        leaves = tree_leaves(changes.attributes(one) or one)
        tensors = [t for t in leaves if isinstance(t, torch.Tensor) and not is_lazy(t)]
        live = [t for t in self._how.live if is_plain(t) and not is_divided(t) and t.numel()]
        known, all_of = {t.data_ptr() for t in live}, sum(t.numel() for t in live)
        return any(
            t.numel() == all_of
            or any(t.shape == o.shape and (t.device != o.device or t.equal(o)) for o in live)
            for t in filter(is_plain, tensors)
            if not (t.is_meta or is_divided(t)) and t.data_ptr() not in known
        )

    def look_at_data(self, *, again: bool) -> bool:
        """Call where an epoch ends or the first one begins, and ``again`` behind what is done there
        and before the next. Returns whether something has changed of which that was not known.
        """
        datasets = self._places.datasets
        if not again:
            self._of_data.look(datasets)
        elif self._of_data.changed(datasets, self._how):
            self._places = self._found()
            return True
        return False

    def forget(self) -> None:
        """Let go of the user's frames, which may hold workers of a loader."""
        self._frames, self._others, self._places, self._packages = [], [], places.Places((), ()), {}
        for spaces in [self._numbers.shared] if self._numbers else []:
            spaces.clear()  # the body has the same list
        self._counts, self._numbers = [], None

    def begin_epoch(self) -> None:
        self._at_epoch = self._changed()

    def begin_loop(self, state: LoopState, *, goes_on: bool) -> Numbers | None:
        """Call where a loop asks for its first batch; ``goes_on``: others were trained before, so
        that what enumerates them goes on, too. Returns the numbers that the body may change.
        """
        if goes_on:
            self.go_on()
        self._counts = counts()
        then = self._saved.pop('counts', ())
        for one, number in zip(self._counts, then if goes_on else (), strict=False):
            set_number(one, number)
        if self._goes_back:
            self._first = self._first or self._small()
            self._begun = self._begun if goes_on else [*map(number_of, self._counts)]
        if not self._frames:
            return None
        numbers = Numbers(self._frames, self._places, self._how, self._counts, state)
        numbers.here = self._numbers.here if self._numbers else self._saved.pop('here', -1)
        self._numbers = numbers
        return numbers

    def go_on(self) -> None:
        """Put variables back once more: some may have been set since ctx.loop was called."""
        if 'counts' in self._saved and not self._went_on:
            self._went_on = True
            self.put_back('loop')

    def go_back(self, saved: Mapping[str, Any], *, begins: bool) -> None:
        """Training goes back in this loop, to a checkpoint that holds ``saved``; ``begins``: where
        the loop began.
        """
        self._how = self._how.where(saved.get('ids', ()))
        self._put_back({**self._first, **saved.get('loop', {})})
        counts = self._begun if begins else saved.get('counts', ())
        for one, number in zip(self._counts, counts, strict=False):
            set_number(one, number)
        for name, then in saved.get('kept', {}).items():
            self._kept[name].load_state_dict(self._value(then))

    def _small(self) -> dict[str, Any]:
        found = {}
        for path, one in self._variables():
            if changes.may_be_saved(one) and not changes.is_large(one):
                with suppress(NotPlain):
                    found[path] = packed(one, self._how)
        return found

    @property
    def differs(self) -> bool:
        """Whether ranks have changed tables by sample that were not put together since."""
        return self._numbers is not None and self._numbers.has_parts(0)

    def end_loop(self) -> None:
        self._ends.append(self._changed())

    def pass_over(self) -> None:
        """Call in place of a loop that an earlier fragment has trained: what is behind it goes on
        from the variables at its end.
        """
        self._ends += self._saved.get('ends', [])[len(self._ends) : len(self._ends) + 1]
        if self._ends:
            self._put_back(self._ends[-1])

    def put_back(self, moment: str) -> None:
        """Set variables to what the checkpoint holds: 'epoch' or 'loop'."""
        self._put_back(self._saved.get(moment, {}))

    def _put_back(self, saved: Mapping[str, Any]) -> None:
        for place, now in self._places:
            if place.path in saved:
                place.put(self._value(saved[place.path], now))
        for path, module in self._places.modules.items():
            for name, then in _named(saved, f'{path}.').items():
                vars(module).setdefault(name, self._value(then))  # first made in forward, perhaps
        for frame in self._frames:
            its, own = frame.f_globals, frame.f_locals
            for name, then in _named(saved, f'{places.GLOBAL}{its["__name__"]}:').items():
                if name not in its:
                    its[name] = self._value(then)
            found = _named(saved, f'{frame.f_code.co_qualname}.')
            if found := {name: self._value(then, own.get(name)) for name, then in found.items()}:
                set_variables(frame, found)

    def state(self, *, finished: bool, room: list[int] | None = None) -> dict[str, Any]:
        """What a checkpoint holds; ``finished``: the function has returned; ``room``: elements and
        bytes that there may be in all, of which those that there are are taken off.
        """
        if room is None:  # some may be new
            self._places = self._found()
        return {
            'epoch': self._at_epoch or {},
            'loop': {} if finished else self._changed(room),
            'kept': {
                name: packed(one.state_dict(), self._how, room=room)
                for name, one in self._kept.items()
            },
            'once': [*self._once],
            'ends': [*self._ends],
            'counts': [] if finished else [*map(number_of, self._counts)],
            'here': self._numbers.here if self._numbers else -1,
            'ids': self._how.ids_now,
        }

    def marks(self) -> dict[str, Any]:
        """What shows a later change of any of them, or of an object that is kept."""
        every = {**dict(self._variables()), **self._kept}
        return {path: changes.mark(one) for path, one in every.items() if changes.may_be_saved(one)}

    def copied(self) -> dict[str, Any] | None:
        """As :meth:`state`; None: that is too large to be copied at the end of each batch."""
        room = [*changes.COPIED]
        with suppress(NotPlain):
            found = self.state(finished=False, room=room)
            return found if min(room) >= 0 else None
        return None

    def keep(self, thing: Any, name: str | None) -> None:
        kind = type(thing).__name__
        if not changes.has_state(thing):
            raise BadInput(
                f'ctx.keep was given a {kind}; it takes objects with state_dict and '
                'load_state_dict, and ctx.prepare takes optimizers.'
            )
        name = name or f'{kind}_{len(self._kept) + 1}'
        if name in self._kept:
            raise BadInput(f'ctx.keep was called twice with the name {name!r}: give other names.')
        if (then := self._saved.get('kept', {}).get(name)) is not None:
            thing.load_state_dict(self._value(then))
        try:
            packed(thing.state_dict(), self._how)
        except NotPlain as error:
            raise BadInput(
                f'ctx.keep was given a {kind} whose state has {error} in it: a checkpoint holds '
                'tensors, numbers, texts and containers of them.'
            ) from None
        self._kept[name] = thing

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of objects with a state that :meth:`keep` got or variables have; not metrics'."""
        every = ((path.rpartition('.')[2], one) for path, one in self._variables())
        own = {name: one for name, one in every if changes.has_own_state(one)}
        return changes.tensors_in({**own, **self._kept})

    def changed(self) -> dict[str, Any]:
        """What :meth:`keep` got, and variables that are not as they were where the loop began."""
        then, every = self._marks or {}, self._variables()
        new = {path: one for path, one in every if then.get(path, self) != changes.mark(one)}
        return {**new, **self._kept}

    def once(self, function: Callable[[], Any]) -> Any:
        then = self._saved.get('once', [])[len(self._once) : len(self._once) + 1]
        if then and not (isinstance(then[0], tuple) and then[0][0] == 'state'):
            self._once.append(then[0])
            return self._value(then[0])
        value = function()
        if then:
            self._value(then[0], value)
        try:
            self._once.append(packed(value, self._how))
        except NotPlain as error:
            raise BadInput(
                f'The function given to ctx.once returned what has {error} in it: return '
                'tensors, numbers, texts and containers of them, or a module.'
            ) from None
        return value

    def _value(self, then: Any, now: Any = None) -> Any:
        return unpacked(then, now, self._how)

    def _class(self, name: str) -> Any:
        known = [its.get(name) for f in self._frames for its in (f.f_locals, f.f_globals)]
        known.append(self._places.classes.get(name))
        return next((one for one in known if isinstance(one, (type, FunctionType))), None)

    def _variables(self, *, all_of: bool = False) -> Iterator[tuple[str, Any]]:
        found: dict[str, Any] = {}
        for frame in self._frames:
            code, own = frame.f_code, frame.f_locals
            names = own.keys() if all_of else places.live_names(code, frame.f_lasti) & own.keys()
            found.update((f'{code.co_qualname}.{name}', own[name]) for name in names)
        found.update((place.path, one) for place, one in self._places)
        for path, one in found.items():
            left_out = changes.is_ours(one) or isinstance(one, (Dataset, DataLoader, ModuleType))
            left_out |= callable(one) and not changes.may_be_saved(one)
            left_out |= ':' in path and any(one is kept for kept in self._kept.values())
            if not (left_out or id(one) in self._how.known):
                yield path, one

    def _changed(self, room: list[int] | None = None) -> dict[str, Any]:
        marks, saved = self._marks or {}, (self._saved.get(one, {}) for one in ('epoch', 'loop'))
        before = {path: then for moment in saved for path, then in moment.items()}
        found = {}
        for path, one in self._variables():
            goes_on = isinstance(one, Iterator) and changes.attributes(one) is None
            looks = (goes_on or changes.is_data(one)) and path in marks and room is None
            if looks and marks[path] != changes.mark(one):
                what = 'an iterator' if goes_on else f'a {type(one).__name__}'
                raise _refused(path, f'is {what}')
            if not changes.may_be_saved(one):
                continue
            if room is not None and changes.is_large(one):
                raise NotPlain('a large variable')
            unchanged = set[Any]()
            if path in marks:
                then, now, kept = marks[path], changes.mark(one), before.get(path)
                if kept is None and then == now:
                    continue
                marked = isinstance(one, torch.nn.Module) and isinstance(then, tuple)
                if marked and then[0] == now[0] and then[1] != now[1]:  # as a MetricTracker's
                    self._lose(path, 'has other modules than before')
                if isinstance(then, dict) and isinstance(now, dict):
                    unchanged = {key for key in now if then.get(key) == now[key]}
                    unchanged -= {*kept[1]} if kept is not None and kept[0] == 'object' else set()
                unchanged |= changes.same_elements(then, now)
            try:
                found[path] = packed(one, self._how, unchanged, room)
                why = self._not_made(found[path], one)
                lost = bool(why) and isinstance(marks.get(path, ()), changes.SCALARS)
            except NotPlain as error:
                # Others are made again, or what changes is in objects that are saved.
                lost = isinstance(one, changes.CONTAINERS) and id(one) not in unchanged
                why, lost = f'has {error} in it', lost or isinstance(error, TooLarge)
                if path in self._of_data.paths and room is None:
                    raise _refused(path, why) from None
            if lost and path in marks and room is None:
                self._lose(path, why)
        return found

    def _not_made(self, packed: Any, one: Any) -> str:
        """Why a fragment could not make it that begins with something else; empty: it can."""
        kind = type(one).__name__
        lost = isinstance(packed, tuple) and (
            (packed[0] == 'state' and packed[2] < 0)
            or (packed[0] == 'object' and self._class(packed[2]) is not type(one))
        )
        return f'is a {kind} that the function has made later' if lost else ''

    def _lose(self, path: str, why: str) -> None:
        """What is not of a function may be a cache."""
        error = _refused(path, why)
        if '.' in path and ':' not in path:
            raise error
        if path not in self._said:
            self._said.add(path)
            print(error)


def _named(saved: Mapping[str, Any], here: str) -> dict[str, Any]:
    names = {path.removeprefix(here): path for path in saved if path.startswith(here)}
    return {name: saved[path] for name, path in names.items() if name.isidentifier()}


def _refused(path: str, why: str) -> BadInput:
    return BadInput(
        f'The variable {path} changes while training goes on, and a checkpoint cannot hold it, as '
        f'it {why}: keep numbers, texts, tensors and containers of them, fewer of them if there '
        'are very many, or let it depend on ctx.samples.'
    )

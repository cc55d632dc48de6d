"""A rehearsal: some steps of a training here, undisturbed, cut and killed, must be the same."""

import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.fragment.payload import definition, pack
from parsl_freetrain.host.rehearsals import note
from parsl_freetrain.training.checkpoint import next_step
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.checkpoint.next_step import NextStep, difference
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace, Rehearsed
from parsl_freetrain.training.spec.messages import Exit, Outcome, Rendezvous
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.spec.training import TrainingSpec

EPOCH_STEPS, SHARDS = 4, 6  # global batches of an epoch, which is cut short, and virtual shards
LIMIT_S = 300.0
_CLOSE = 1e-3  # of what training has changed, another order of additions changes less
_PAGE = 'docs/your-script.md'
_HELP = {
    'cut': f'{_PAGE}: What is kept from fragment to fragment',
    'ranks': f'{_PAGE}: What is the same on any number of nodes',
    'workers': f'{_PAGE}: Data and random numbers',
    'plain': f'{_PAGE}: Losses and batches',
}


@dataclass(frozen=True)
class Row:
    """A form of the training; the ``step`` where it begins to differ, from 1, and ``why``."""

    form: str
    why: str = ''
    step: int | None = None
    help: str = ''
    ran: bool = True

    def __str__(self) -> str:
        if not self.ran:
            return f'-       {self.form}: {self.why}'
        if not self.why:
            return f'same    {self.form}'
        since = f' from step {self.step} on' if self.step else ''
        return f'DIFFERS {self.form}{since}: {self.why}\n        see {self.help}'


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal's result, as a text a table. ``checkpoint``: of the undisturbed form, no path;
    ``notes``: what its log says of how the function is trained.
    """

    trainer: str
    steps: int
    seconds: float
    rows: tuple[Row, ...]
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not any(row.ran and row.why for row in self.rows)

    def __str__(self) -> str:
        ran = sum(row.ran for row in self.rows)
        head = f'{self.trainer}: {self.steps} steps in {ran} forms, {self.seconds:.0f} s'
        return '\n'.join((head, *map(str, self.rows), *self.notes))


@dataclass(frozen=True)
class _Part:
    """A fragment of a form: its ranks, and where and how it is cut (None: not before the end)."""

    ranks: int = 1
    at: int | None = None
    kill: bool = False


@dataclass
class _Run:
    steps: dict[int, NextStep] = field(default_factory=dict)  # by samples before
    # Of each step: number of the loop, samples before, epoch, data workers.
    order: list[tuple[int, int, int, int]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str = ''
    checkpoint: Checkpoint | None = None


def rehearse(
    name: str,
    spec: TrainingSpec,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    steps: int,
    plain: Callable[..., Any] | None,
) -> Rehearsal:
    """As :meth:`parsl_freetrain.app.FreeTrainApp.rehearse`."""
    if steps < 4:
        refuse('The number of steps of a rehearsal', steps, 'at least 4')
    began = time.monotonic()
    payload = pack(function, tuple(args), kwargs, name, values=True).payload
    with tempfile.TemporaryDirectory(prefix='freetrain-rehearsal-') as folder, _server() as server:
        forms = _Forms(name, _spec_of(spec), server, Path(folder), payload, steps)
        first = forms.run('undisturbed', [_Part()])
        if first.error and not isinstance(spec.mode, Reproducible):
            forms = replace(forms, spec=structs.replace(forms.spec, mode=spec.mode))
            first = forms.run('undisturbed', [_Part()])
        if first.error or first.checkpoint is None:
            raise BadInput(f'The rehearsal of {name!r} did not train undisturbed: {first.error}')
        if len(first.order) < 4:
            raise BadInput(
                f'{name!r} trains {len(first.order)} steps in all: a rehearsal needs at least 4.'
            )
        rows = list(forms.compared(first))
        if plain is not None:
            rows.append(forms.beside(lambda batches: plain(batches, *args, **kwargs)))
        note(definition(function))
        last = replace(first.checkpoint, path='')
        seconds = time.monotonic() - began
        return Rehearsal(name, len(first.order), seconds, tuple(rows), last, first.notes)


@dataclass
class _Forms:
    """Runs forms of one training, each in a folder of its own."""

    name: str
    spec: TrainingSpec
    server: ForkClient
    folder: Path
    payload: bytes
    steps: int
    until: int | None = None

    def compared(self, first: _Run) -> Iterator[Row]:
        places = first.order
        self.until = places[-1][1]
        starts = [samples for _, samples, *_ in places]
        two = starts[1]
        ends = [a[1] for a, b in pairwise(places) if a[2] != b[2]]
        loops = [b[1] for a, b in pairwise(places[:-1]) if a[0] != b[0]]
        few = f'none within {len(places)} steps'
        for form, at in (
            ('stopped in the first loop, and continued', two),
            ("stopped at an epoch's end, and continued", ends[0] if ends else None),
            ('stopped after a loop, and continued', loops[0] if loops else None),
        ):
            parts = [_Part(1, at), _Part()]
            yield Row(form, few, ran=False) if at is None else self._row(first, form, parts, 'cut')
        late = starts[min(len(starts) // 2, max(0, len(starts) - 4))]
        yield self._row(first, 'killed, and continued', [_Part(1, late, kill=True), _Part()], 'cut')
        if not isinstance(self.spec.mode, Reproducible):
            yield Row('on two and three ranks', 'reproducible mode refuses it', ran=False)
            return
        yield self._row(first, 'on two ranks', [_Part(2)], 'ranks')
        yield self._row(first, 'on three ranks, then on one', [_Part(3, two), _Part()], 'ranks')
        other = 0 if places[0][3] else 2
        form = 'with two DataLoader workers' if other else 'without DataLoader workers'
        yield self._row(first, form, [_Part()], 'workers', workers=other)

    def run(self, form: str, parts: Sequence[_Part], **how: Any) -> _Run:
        folder, found = Path(tempfile.mkdtemp(dir=self.folder)), _Run()
        for number, part in enumerate(parts, 1):
            trace = str(folder / 'steps')
            says = Rehearsed(EPOCH_STEPS, self.steps, self.until, part.at, part.kill, trace, **how)
            order = FragmentOrder(
                self.name, number, str(folder / 'store'), self.spec, None, interface='lo',
                rehearsed=says,
            )  # fmt: skip
            found.error = self._fragment(order, part, folder)
            for step in sorted((folder / 'store' / next_step.FOLDER).glob('f*')):
                fragment, samples = step.name.removeprefix('f').split('-')
                kept = next_step.read(folder / 'store', int(samples), int(fragment))
                if kept is not None and (kept.after or kept.measured):
                    found.steps[int(samples)] = kept
            if found.error:
                break
        lines = (folder / 'f1-r0.log').read_text().splitlines()
        found.notes = tuple(line for line in lines if line.startswith('Note: '))
        if (folder / 'steps').exists():
            lines = (folder / 'steps').read_text().splitlines()
            found.order = [tuple(json.loads(line)) for line in lines]
        last = found.checkpoint = PosixCheckpointStore(folder / 'store', self.name).latest()
        if last is not None:
            saved = read_state(last.path)
            found.rest = {'ctx.state': saved.position.user, 'the number of samples': last.samples}
            found.weights = load_weights(last.path)
        return found

    def beside(self, plain: Callable[[Iterator[Any]], Any]) -> Row:
        """The plain twin, which is given the global batches, against one shard on one rank."""
        form, folder = 'as plain PyTorch', Path(tempfile.mkdtemp(dir=self.folder))
        mode = structs.replace(self.spec.mode, shards=1)
        spec = structs.replace(self.spec, mode=mode, max_nodes=1)
        alone = replace(self, spec=spec, until=None).run(form, [_Part()], batches=str(folder))
        files = sorted(folder.glob('*'))[: self.steps]
        batches = [torch.load(file, weights_only=False) for file in files]
        if alone.error or not alone.weights:
            return Row(form, alone.error, help=_HELP['plain'])
        theirs = plain(iter(batches))
        theirs = theirs.state_dict() if isinstance(theirs, torch.nn.Module) else theirs
        many = self.run(form, [_Part()])
        for run, what in ((alone, 'in one piece'), (many, f'in {SHARDS} virtual shards')):
            for name, tensor in run.weights.items():
                if name not in theirs:
                    return Row(form, f'{name!r} is not among its weights', help=_HELP['plain'])
                apart = float((tensor.double() - theirs[name].detach().double()).norm())
                size = float(theirs[name].detach().double().norm()) or 1.0
                if apart > _CLOSE * size:
                    why = (
                        f'with each global batch {what}, {name!r} is {apart / size:.2g} of its '
                        'size away; a loss that is no mean over samples, or statistics of a batch, '
                        'depend on how it is divided'
                    )
                    return Row(form, why, help=_HELP['plain'])
        return Row(form)

    def _row(self, first: _Run, form: str, parts: Sequence[_Part], kind: str, **how: Any) -> Row:
        run, starts = self.run(form, parts, **how), sorted(first.steps)
        for number, samples in enumerate(starts, 1):
            if samples in run.steps and (
                why := difference(first.steps[samples], run.steps[samples])
            ):
                about = run.error.partition(why)[2].partition(' Give ctx.prepare')[0]
                return Row(form, why + about, number, _HELP[kind])
        if run.error:
            return Row(form, run.error, help=_HELP[kind])
        for what, value in first.rest.items():
            if run.rest.get(what) != value:
                why = f'{what} is {run.rest.get(what)!r} at the end, and undisturbed {value!r}'
                return Row(form, why, help=_HELP[kind])
        return Row(form)

    def _fragment(self, order: FragmentOrder, part: _Part, folder: Path) -> str:
        logs = [folder / f'f{order.fragment}-r{rank}.log' for rank in range(part.ranks)]
        ranks = [
            self.server.launch(order, RankPlace(i, part.ranks, i, 1, str(log)), self.payload, {})
            for i, log in enumerate(logs)
        ]
        outcomes: dict[int, Outcome] = {}
        going, until = set(range(part.ranks)), time.monotonic() + LIMIT_S
        try:
            while going:
                left_s = until - time.monotonic()
                ready = wait([ranks[i].fileno() for i in going], max(left_s, 0.0))
                if not ready:
                    return f'it was not over after {LIMIT_S:.0f} s'
                for i in [i for i in going if ranks[i].fileno() in ready]:
                    match ranks[i].recv():
                        case Exit():
                            going.discard(i)
                        case Outcome() as outcome:
                            outcomes[i] = outcome
                        case Rendezvous() as meeting:
                            for other in ranks[1:]:
                                other.send(meeting)
        finally:
            for rank in ranks:
                rank.kill()
                rank.close()
        errors = [o.error for o in outcomes.values() if o.error and o.how == 'error']
        errors += [o.error for o in outcomes.values() if o.error]
        if errors:
            return f'{errors[0].type}: {errors[0].message}'
        if len(outcomes) < part.ranks and not part.kill:
            return f'a rank died: {logs[0].read_text()[-500:]}'
        return ''


def _spec_of(spec: TrainingSpec) -> TrainingSpec:
    """In reproducible mode, in which bits can be compared, on up to three ranks."""
    mode = spec.mode
    if not isinstance(mode, Reproducible):
        mode = Reproducible(seed=mode.seed, on_nan=mode.on_nan)
    if spec.shapes:
        raise BadInput('A trainer with shapes cannot be rehearsed yet: leave out sizes.')
    mode = structs.replace(mode, shards=max(SHARDS, mode.shards or 0), on_difference='fail')
    return structs.replace(spec, mode=mode, min_nodes=1, max_nodes=3, sizes=()).with_ranks(1)


@contextmanager
def _server() -> Iterator[ForkClient]:
    with tempfile.TemporaryDirectory(prefix='freetrain-') as folder:
        name = f'rehearsal-{secrets.token_hex(8)}'
        server = ForkClient.start(name, os.getpid(), str(Path(folder, 'fork_server.log')))
        try:
            server.wait_ready(LIMIT_S)
            yield server
        finally:
            server.stop()

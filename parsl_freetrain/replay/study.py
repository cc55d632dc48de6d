"""A study: the settings of a replay, from a TOML file, the command line, or both."""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, Self, get_args

from msgspec import ValidationError, convert

from parsl_freetrain.core.allocation.solvers import SolverName
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import checked_values as checked
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import read_toml
from parsl_freetrain.replay.habits import read_habits
from parsl_freetrain.replay.scenario import Scenario
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer, read_trainers
from parsl_freetrain.replay.world import CurveLearning

KINDS = ('idle', 'swf', 'sacct', 'pbs')
OF_A_TRACE = (*KINDS, 'synthetic', 'machine_nodes', 'nodes', 'since', 'until')
FILES = (*KINDS, 'trainers', 'habits')


class Study(Settings, frozen=True, kw_only=True):
    """The settings of ``freetrain replay``, in a TOML file or as options (``--max-trainers 10``).

    Attributes
    ----------
    idle
        The machine's record: idle intervals, as CSV ``start_s,end_s,node``.
    swf, sacct, pbs
        In place of ``idle``: a job log in Standard Workload Format, what ``sacct --parsable2``
        printed, or an accounting log of PBS.
    synthetic
        In place of a record, the seed of a made-up week with the statistics of Summit.
    machine_nodes
        Nodes of the machine, where a job log does not say.
    nodes
        Only the first so many node names in sorted order.
    since
        Seconds from the record's start (``from``).
    until
        Seconds from the record's start.
    trainers
        The trainers: a JSON list, plain or gzipped.
    max_trainers
        Maximum number of unfinished trainers that share the nodes, or 'all'.
    horizon
        Seconds that a decision looks ahead; default: 120; of a recorded run, as in the run.
    solver
        'auto' (the fastest exact one; the default), 'milp', 'dp' or 'equal-share' (the published
        heuristic); of a recorded run, as in the run.
    time_limit
        Maximum seconds for one solve; then the best allocation found is used.
    objective
        A metric or an expression, in place of what the trainers' file says.
    rescale_cost
        Factor on all rescale costs.
    rescale_up, rescale_down
        Seconds without training after a change to more nodes, or to fewer and after a preemption,
        in place of what the trainers say.
    spans_blocks
        Whether a trainer may use nodes that became idle at different times.
    known_ends
        Whether decisions know when reservations will take nodes; needs a job log.
    min_hole
        Nodes that are known to leave sooner than after so many seconds are not used.
    min_rescale
        Minimum seconds between two rescales of a trainer.
    habits
        A file that says how long nodes stay, as ``--learn-habits`` has written it.
    curves
        Whether decisions know the trainers' scaling curves ('stated'), or learn them from what
        fragments measure ('learned').
    noise
        Relative noise of measured speeds; default: 0.
    measure_s
        Seconds until the first measurement of a fragment's speed, doubled for each later one;
        default: 10.
    seed
        Seed of the noise; default: 0.
    """

    idle: Path | None = None
    swf: Path | None = None
    sacct: Path | None = None
    pbs: Path | None = None
    synthetic: int | None = None
    machine_nodes: int | None = None
    nodes: int | None = None
    since: checked.Number | None = None
    until: checked.Number | None = None
    trainers: Path | None = None
    max_trainers: checked.AtLeast1 | Literal['all'] = 'all'
    horizon: checked.PositiveSeconds = 120.0
    solver: SolverName = SolverName.AUTO
    time_limit: checked.PositiveSeconds = 10.0
    objective: str | None = None
    rescale_cost: checked.NotNegative = 1.0
    rescale_up: checked.Seconds | None = None
    rescale_down: checked.Seconds | None = None
    spans_blocks: bool = True
    known_ends: bool = False
    min_hole: checked.Seconds = 5.0
    min_rescale: checked.Seconds = 0.0
    habits: Path | None = None
    curves: Literal['stated', 'learned'] = 'stated'
    noise: checked.Share | None = None
    measure_s: checked.PositiveSeconds | None = None
    seed: checked.Count | None = None

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """The study with these values, read as on the command line; BadInput names a wrong one."""
        fields = {field_named(name): value for name, value in values.items()}
        return cls(**{name: _read(name, value) for name, value in fields.items()})

    @classmethod
    def of_trace(cls, values: Mapping[str, object], why: str) -> Self:
        """As :meth:`of`; what is not about the trace is refused, since ``why`` needs none of it."""
        for name in values:
            if field_named(name) not in OF_A_TRACE:
                raise BadInput(
                    f'{option(name)} does not go with {why}, which only needs a record: '
                    f'{", ".join(map(option, OF_A_TRACE))}.'
                )
        return cls.of(values)

    def trace(self) -> Trace:
        # Imported here, so that --help need not wait for Parsl.
        from parsl_freetrain.replay.read import kind_of, read_trace, synthetic

        files = {kind: path for kind in KINDS if (path := getattr(self, kind)) is not None}
        if len(files) + (self.synthetic is not None) != 1:
            raise BadInput(
                'Give one trace, with one of --idle, --swf, --sacct, --pbs and --synthetic.'
            )
        if self.synthetic is not None:
            return synthetic(self.synthetic).window(self.nodes, self.since, self.until)
        ((kind, path),) = files.items()
        found = kind_of(path)
        if found != kind:
            # An unknown kind of file counts as idle intervals.
            hint = '' if found == 'idle' else f'; it looks like what --{found} takes'
            raise BadInput(f'{path} does not look like what --{kind} takes{hint}.')
        part = self.nodes, self.since, self.until
        return read_trace(path, *part, machine_nodes=self.machine_nodes)

    def read_trainers(self) -> tuple[ReplayTrainer, ...]:
        if self.trainers is None:
            raise BadInput('Give --trainers: a JSON list of the trainers.')
        return read_trainers(self.trainers)

    def scenario(
        self, trace: Trace | None = None, trainers: tuple[ReplayTrainer, ...] | None = None
    ) -> Scenario:
        """The scenario; its trace and trainers are read unless they are given. Raises BadInput."""
        learning = self._learning()
        trace = trace or self.trace()
        objective = self.objective or (None if learning is None else 'speedup')
        settings = ControllerSettings(
            horizon_s=self.horizon,
            min_hole_s=self.min_hole,
            metric=objective or 'throughput',
            spans_blocks=self.spans_blocks,
            min_rescale_s=self.min_rescale,
            habits=None if self.habits is None else read_habits(self.habits, trace.names),
            trainers_at_a_time=None if self.max_trainers == 'all' else self.max_trainers,
        )
        costs = self.rescale_cost, self.rescale_up, self.rescale_down
        how = settings, self.solver, self.time_limit, self.known_ends, *costs
        who = trainers or self.read_trainers()
        return Scenario(trace, who, *how, by_file=objective is None, learning=learning)

    def _learning(self) -> CurveLearning | None:
        stated = {name: getattr(self, name) for name in ('noise', 'measure_s', 'seed')}
        told = {name: value for name, value in stated.items() if value is not None}
        if self.curves == 'learned':
            return CurveLearning(**told)
        if told:
            raise BadInput(f'{option(next(iter(told)))} goes with --curves learned only.')
        return None


def _read(name: str, value: Any) -> Any:
    hint = checked.hints_of(Study)[name]
    if isinstance(value, str):
        try:
            value = convert(value, hint, strict=False, dec_hook=lambda kind, text: kind(text))
        except ValidationError:  # what is wrong is said below
            with suppress(ValueError):
                value = float(value)
                value = int(value) if value.is_integer() else value
    if value is not None and type(None) in get_args(hint):
        hint = reduce(or_, (each for each in get_args(hint) if each is not type(None)))
    checked.check_value(option(name), value, hint)
    return value


def read_study(path: Path) -> tuple[dict[str, object], dict[str, list[object]]]:
    """A TOML file's values and those of its ``[sweep]``, by field; its folder's files. BadInput."""
    values = read_toml(path, 'The study', 'name a TOML file')
    swept = values.pop('sweep', {})
    if not isinstance(swept, dict) or not all(
        isinstance(each, list) and len({*map(repr, each)}) == len(each) > 0
        for each in swept.values()
    ):
        raise BadInput(
            f'The study {path}: sweep is {swept!r}; it must be a table of lists of different '
            'values, such as horizon = [60, 120].'
        )

    def placed(field: str, value: object) -> object:
        return path.parent / value if field in FILES and isinstance(value, str) else value

    fields = {field_named(name): value for name, value in values.items()}
    axes = {field_named(name): each for name, each in swept.items()}
    return (
        {field: placed(field, value) for field, value in fields.items()},
        {field: [placed(field, value) for value in each] for field, each in axes.items()},
    )


def option(name: str) -> str:
    return '--from' if name == 'since' else f'--{name.replace("_", "-")}'


def field_named(name: str) -> str:
    """The field of an option's name, with or without its dashes; raises BadInput."""
    found = {option(field).removeprefix('--'): field for field in Study.__struct_fields__}
    plain = name.removeprefix('--').replace('_', '-')
    if (field := found.get('from' if plain == 'since' else plain)) is None:
        near = difflib.get_close_matches(plain, found, 1)
        raise BadInput(f'A replay has no setting {name!r}; it has {", ".join(near or found)}.')
    return field

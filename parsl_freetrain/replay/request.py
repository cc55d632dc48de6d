"""The request for a replay: numbers, names and files, each of which can be swept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.habits import read_habits
from parsl_freetrain.replay.idle import synthetic
from parsl_freetrain.replay.read import kind_of, read_trace
from parsl_freetrain.replay.scenario import Scenario
from parsl_freetrain.replay.speed_measuring import CurveLearning
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer, read_trainers

KINDS = ('idle', 'swf', 'sacct', 'pbs')
TRACE_OPTIONS = (*KINDS, 'synthetic', 'machine_nodes', 'nodes', 'since', 'until')
MEANT = {
    'max_trainers': 'a whole number above 0, or all',
    'solver': 'auto, milp, dp or equal-share',
    'since': 'a number of seconds',
    'until': 'a number of seconds',
    'time_limit': 'a number of seconds above 0',
    'spans_blocks': 'true or false',
    'known_ends': 'true or false',
    'curves': 'stated or learned',
}


class TraceRequest(BaseModel):
    """The options of ``freetrain replay`` that name a trace, as fields; texts are parsed as on the
    command line.

    Attributes
    ----------
    idle, swf, sacct, pbs, synthetic
        The trace: one of these files, or the seed of a synthetic one.
    machine_nodes, nodes
        Number of nodes of the machine, if a job log does not give it; and number of nodes to use,
        the first ones in sorted order.
    since, until
        The window (``--from``, ``--until``), in seconds of the trace's clock.
    """

    model_config = ConfigDict(frozen=True, extra='forbid')

    idle: Path | None = None
    swf: Path | None = None
    sacct: Path | None = None
    pbs: Path | None = None
    synthetic: int | None = None
    machine_nodes: int | None = None
    nodes: int | None = None
    since: FiniteFloat | None = None
    until: FiniteFloat | None = None

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Self:
        """Make a request from options by name; raises BadInput with a sentence about the first
        invalid one.
        """
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            name = str(error.errors()[0]['loc'][0])
            meant = MEANT.get(
                name,
                'a whole number'
                if name in ('synthetic', 'machine_nodes', 'nodes', 'seed')
                else 'a number',
            )
            raise BadInput(f'{option(name)} is {options.get(name)}; it must be {meant}.') from None

    @classmethod
    def alone(cls, options: Mapping[str, object], why: str) -> Self:
        """As :meth:`of`; options that are not of a trace are refused, since ``why`` needs none."""
        for name in options:
            if name not in TRACE_OPTIONS:
                raise BadInput(
                    f'{option(name)} does not go with {why}, which only needs a record: '
                    f'{", ".join(map(option, TRACE_OPTIONS))}.'
                )
        return cls.of(options)

    def trace_options(self) -> tuple[object, ...]:
        """The options of the trace: requests for which they are equal have the same trace."""
        return tuple(getattr(self, name) for name in TRACE_OPTIONS)

    def trace(self) -> Trace:
        """Read or generate the trace; raises BadInput."""
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
            hint = (
                '' if found == 'idle' else f'; it looks like what --{found} takes'
            )  # an unknown kind of file counts as idle intervals
            raise BadInput(f'{path} does not look like what --{kind} takes{hint}.')
        return read_trace(
            path, self.nodes, self.since, self.until, machine_nodes=self.machine_nodes
        )


class ReplayRequest(TraceRequest):
    """All options of ``freetrain replay`` as fields.

    Attributes
    ----------
    trainers
        The file of trainers.
    max_trainers
        Maximum number of unfinished trainers that share the nodes.
    objective
        The objective; None: that of the trainers' file.
    horizon, time_limit, rescale_cost, rescale_up, rescale_down, known_ends, min_hole, min_rescale
        As the attributes of these names, with ``_s`` where they are seconds, in
        :class:`~parsl_freetrain.replay.scenario.Scenario` and its settings.
    habits
        A file of habits, see :func:`~parsl_freetrain.replay.habits.read_habits`.
    curves
        Whether decisions know the trainers' scaling curves.
    noise, measure_s, seed
        For learned curves, see :class:`~parsl_freetrain.replay.speed_measuring.CurveLearning`.
    """

    trainers: Path
    max_trainers: PositiveInt | Literal['all'] = 'all'
    horizon: float = 120.0
    solver: Literal['auto', 'milp', 'dp', 'equal-share'] = 'auto'
    time_limit: Annotated[FiniteFloat, Field(gt=0)] = 10.0
    objective: str | None = None
    rescale_cost: float = 1.0
    rescale_up: float | None = None
    rescale_down: float | None = None
    spans_blocks: bool = True
    known_ends: bool = False
    min_hole: float = 5.0
    min_rescale: float = 0.0
    habits: Path | None = None
    curves: Literal['stated', 'learned'] = 'stated'
    noise: float | None = None
    measure_s: float | None = None
    seed: int | None = None

    def scenario(
        self, trace: Trace | None = None, trainers: tuple[ReplayTrainer, ...] | None = None
    ) -> Scenario:
        """The scenario to replay. The trace and the trainers are read unless they are given; raises
        BadInput.
        """
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
        return Scenario(
            trace,
            trainers or read_trainers(self.trainers),
            settings,
            self.solver,
            self.time_limit,
            self.known_ends,
            self.rescale_cost,
            self.rescale_up,
            self.rescale_down,
            by_file=objective is None,
            learning=learning,
        )

    def _learning(self) -> CurveLearning | None:
        given = {
            name: value
            for name in ('noise', 'measure_s', 'seed')
            if (value := getattr(self, name)) is not None
        }
        if self.curves == 'learned':
            return CurveLearning(**given)
        if given:
            raise BadInput(f'{option(next(iter(given)))} goes with --curves learned only.')
        return None


def option(name: str) -> str:
    """The option's name of a field."""
    return '--from' if name == 'since' else f'--{name.replace("_", "-")}'


def field_named(name: str) -> str:
    """The field of an option's name, with or without its dashes; raises BadInput."""
    found = {option(field).removeprefix('--'): field for field in ReplayRequest.model_fields}
    field = found.get(name.removeprefix('--').replace('_', '-'))
    if field is None:
        raise BadInput(
            f'There is nothing called {name!r} to sweep; give one of {", ".join(found)}.'
        )
    return field

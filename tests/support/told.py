"""The events of runs as a test tells them, in a journal or only as their state."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model import types
from parsl_freetrain.core.model.fold import fold
from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.append import JournalWriter


def trainer(name: str, total_samples: int | None, spec: Mapping[str, Any]) -> types.Trainer:
    """A trainer; ``spec``: its further arguments, a curve as lists."""
    given = dict(spec)
    if curve := given.pop('curve', None):
        given['curve'] = types.ScalingCurve(tuple(curve['nodes']), tuple(map(float, curve['rate'])))
    least = given.pop('min_nodes', 1)
    return types.Trainer(name, least, given.pop('max_nodes', max(least, 4)), total_samples, **given)


class Told:
    """What a test says of runs.

    Attributes
    ----------
    history
        The state.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.history = History()
        self._path, self._writer = path, None if path is None else JournalWriter(path)

    def take(self, event: ev.Event) -> None:
        fold(self.history, [event])
        if self._writer is not None:
            self._writer.take(event)

    def begin_run(self, name: str, *, at: float, command: str = '', **about: Any) -> None:
        began = ev.RunBegan(at, name, command=command, **about)
        fold(self.history, [began])
        if self._path is not None:
            if self._writer is None:
                self._writer = JournalWriter(self._path)
            self._writer.begin_run(began)

    def end_run(self, *, at: float, how: str) -> None:
        self.take(ev.RunEnded(at, how))  # which closes the file
        self._writer = None

    def alive(self, at: float) -> None:
        self.take(ev.OffersSeen(at, ()))

    def commit(self) -> None:
        """What was said is in the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def offered(self, spells: Iterable[tuple[str, float, float | None]]) -> None:
        offers = tuple(
            types.NodeOffer(name, start, math.inf if end is None else end)
            for name, start, end in spells
        )
        self.take(ev.OffersSeen(self.history.runs[-1].last_at, offers))

    def block_opened(
        self,
        block: str,
        *,
        at: float,
        nodes: int = 1,
        walltime_s: float | None = None,
        names: Sequence[str] = (),
        node_class: str = '',
    ) -> None:
        request = types.BlockRequest(nodes, walltime_s, names=tuple(names), node_class=node_class)
        self.take(ev.BlockOpened(at, block, request, '1'))

    def joined(self, node: str, *, at: float, block: str, name: str) -> None:
        self.take(ev.NodesJoined(at, block, (node,), hosts=(name,)))

    def left(self, node: str, *, at: float, how: str = 'lost') -> None:
        self.take(ev.NodesLeft(at, (node,), how))

    def block_closed(self, block: str, *, at: float, how: str) -> None:
        self.take(ev.BlockClosed(at, block, how))

    def submitted(
        self,
        name: str,
        *,
        at: float,
        spec: Mapping[str, Any] | None = None,
        total_samples: int | None = None,
        samples: int = 0,
        total_epochs: float | None = None,
    ) -> None:
        one = trainer(name, total_samples, spec or {})
        self.take(ev.TrainerSubmitted(at, one, samples, total_epochs=total_epochs))

    def over(self, name: str, *, at: float, state: str, why: str = '') -> None:
        self.take(ev.Decided(at, (ev.EndTrainer(name, state, why),)))

    def fragment_decided(
        self,
        name: str,
        number: int,
        *,
        at: float,
        nodes: Iterable[str],
        from_samples: int = 0,
        deadline: float | None = None,
        shape: int = 0,
    ) -> None:
        on = tuple(nodes)
        self.take(ev.FragmentLaunched(at, name, number, on, deadline, from_samples, shape, number))

    def fragment_started(self, name: str, number: int, *, at: float, samples: int) -> None:
        self.take(ev.FragmentStarted(at, name, number, samples))

    def fragment_progress(
        self,
        name: str,
        number: int,
        *,
        at: float,
        samples: int,
        rate: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.take(ev.FragmentProgressed(at, name, number, samples, rate, metrics or {}))

    def checkpoint(
        self, name: str, number: int, *, at: float, samples: int, seconds: float = 0.0, **more: Any
    ) -> None:
        saved = types.Checkpoint(name, '', samples, number, at=at, seconds=seconds, **more)
        self.take(ev.CheckpointSaved(at, saved))

    def fragment_ended(
        self, name: str, number: int, *, at: float, ending: str, samples: int, **more: Any
    ) -> None:
        self.take(ev.FragmentEnded(at, name, number, samples, ev.Ending(ending), **more))

    def decision(self, at: float, *actions: ev.Action, **more: Any) -> None:
        given = {'trigger': 'NodesJoined', 'nodes': 2, 'status': 'optimal', 'solver': 'dp'}
        self.take(ev.Decided(at, actions, **{**given, **more}))

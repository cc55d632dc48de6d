"""The trainers and fragments of a run, their progress and their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parsl_freetrain.ledger.pending_rows import PendingRows, Value, as_float, as_int, as_json


class TrainerRows:
    """The tables ``trainers``, ``fragments``, ``progress`` and ``checkpoints`` of one run."""

    def __init__(self, rows: PendingRows) -> None:
        self._rows = rows

    def submitted(
        self,
        *,
        name: str,
        at: float,
        spec: Mapping[str, Any],
        total_samples: int | None,
        samples: int,
    ) -> None:
        """A trainer was submitted; ``samples`` were trained already when it is resumed."""
        self._rows.insert(
            'trainers',
            {
                'name': str(name),
                'submitted_at': float(at),
                'spec': as_json(spec),
                'total_samples': as_int(total_samples),
                'first_samples': int(samples),
                'samples': int(samples),
                'state': 'queued',
                'state_at': float(at),
                'why': '',
            },
            at,
            replace=True,
        )

    def state(self, name: str, *, at: float, state: str, why: str = '') -> None:
        """A trainer's state changed; 'finished', 'failed' and 'cancelled' are final."""
        self._trainer(name, {'state': str(state), 'state_at': float(at), 'why': str(why)}, at)

    def total(self, name: str, total_samples: int | None) -> None:
        """A trainer that is measured in epochs knows its total."""
        self._trainer(name, {'total_samples': as_int(total_samples)}, None)

    def fragment_decided(
        self,
        trainer: str,
        fragment: int,
        *,
        at: float,
        task_id: int | None,
        nodes: Sequence[str],
        deadline: float | None,
        from_samples: int,
    ) -> None:
        """A fragment is to start on ``nodes`` (ids as in
        :meth:`~parsl_freetrain.ledger.node_rows.NodeRows.joined`); its trainer runs from here on.
        """
        self._rows.insert(
            'fragments',
            {
                'trainer': str(trainer),
                'fragment': int(fragment),
                'decided_at': float(at),
                'task_id': as_int(task_id),
                'nodes': as_json(list(nodes)),
                'deadline': as_float(deadline),
                'from_samples': int(from_samples),
            },
            at,
            replace=True,
        )

    def fragment_started(self, trainer: str, fragment: int, *, at: float, samples: int) -> None:
        """The fragment's first training step was handed out."""
        started = {'started_at': float(at), 'started_samples': int(samples)}
        self._fragment(trainer, fragment, started, at)

    def fragment_progress(
        self,
        trainer: str,
        fragment: int,
        *,
        at: float,
        samples: int,
        rate: float | None,
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Samples trained so far, samples per second, and the last reported metrics; kept as a time
        series.
        """
        progress: dict[str, Value] = {
            'rate': as_float(rate),
            'metrics': as_json(dict(metrics or {})),
        }
        key: dict[str, Value] = {'trainer': str(trainer), 'fragment': int(fragment)}
        self._rows.insert(
            'progress', {**key, 'at': float(at), 'samples': int(samples), **progress}, at
        )
        seen = {'seen_at': float(at), 'seen_samples': int(samples), **progress}
        self._fragment(trainer, fragment, seen, at)

    def checkpoint(
        self,
        trainer: str,
        fragment: int,
        *,
        at: float,
        samples: int,
        path: str,
        seconds: float,
        pause_s: float,
        metrics: Mapping[str, float] | None,
    ) -> None:
        """A checkpoint was committed at ``at``; writing it took ``seconds``, and training stood
        still for ``pause_s`` of them or before them.
        """
        self._rows.insert(
            'checkpoints',
            {
                'trainer': str(trainer),
                'fragment': int(fragment),
                'at': float(at),
                'samples': int(samples),
                'path': str(path),
                'seconds': max(0.0, float(seconds)),
                'pause_s': max(0.0, float(pause_s)),
                'metrics': as_json(dict(metrics or {})),
            },
            at,
        )
        self._trainer(trainer, {'samples': int(samples)}, None)

    def fragment_ended(
        self,
        trainer: str,
        fragment: int,
        *,
        at: float,
        ending: str,
        samples: int,
        reached: int,
        committed: int | None = None,
        error: str = '',
    ) -> None:
        """A fragment is over: 'finished', 'stopped', 'preempted' or 'failed'.

        ``samples`` is what the next fragment can go on from, ``reached`` the furthest that was
        seen: the difference is repeated. ``committed``: the last checkpoint's, if that is less.
        """
        ended: dict[str, Value] = {
            'ended_at': float(at),
            'ending': str(ending),
            'samples': int(samples),
            'reached': int(reached),
            'error': str(error),
        }
        self._fragment(trainer, fragment, ended, at)
        saved = samples if committed is None else committed
        self._trainer(trainer, {'samples': int(saved)}, None)

    def _trainer(self, name: str, values: Mapping[str, Value], at: float | None) -> None:
        self._rows.update('trainers', {'name': str(name)}, values, at)

    def _fragment(
        self, trainer: str, fragment: int, values: Mapping[str, Value], at: float | None
    ) -> None:
        key: dict[str, Value] = {'trainer': str(trainer), 'fragment': int(fragment)}
        self._rows.update('fragments', key, values, at)

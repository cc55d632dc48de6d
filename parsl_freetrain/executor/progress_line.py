"""One line on a terminal that says how far the trainers of a run are."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor import off_loop
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.journal.kept_metrics import main_metric

EVERY_S = 0.5
MOST_TRAINERS = 3
_CLEAR = '\r\x1b[K'


class ProgressLine:
    """A subscriber that keeps one line about the trainers up to date, if ``out`` is a terminal. It
    names the ``ledger`` once, for ``freetrain watch``. ``clock``: seconds that only increase.
    """

    def __init__(
        self,
        out: TextIO | None,
        records: Mapping[str, TrainerRecord],
        ledger: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._on = out is not None and out.isatty()
        self._writing = False
        self._records, self._ledger = records, ledger
        self._clock = clock
        self._futures: list[TrainingFuture] = []
        self._shown_at = -EVERY_S

    def take(self, event: ev.Event) -> None:
        """Note a trainer; end the line with the run."""
        match event:
            case ev.TrainerSubmitted(trainer=trainer) if record := self._records.get(trainer.name):
                if self._on and not self._futures:
                    self._write(f'freetrain watch --ledger {self._ledger} shows more.\n')
                self._futures.append(record.future)
            case ev.RunEnded() if self._on and self._futures:
                self._write(_CLEAR + self._line() + '\n')
                self._on = False

    def flush(self) -> None:
        """Show the line, unless that was done a moment ago or still goes on."""
        late = self._on and self._futures and self._clock() - self._shown_at >= EVERY_S
        if late and not self._writing:
            self._shown_at = self._clock()
            self._write(_CLEAR + self._line())

    def _write(self, text: str) -> None:
        """Write where nobody waits: a terminal can be stopped."""

        def write() -> None:
            assert self._out is not None
            try:
                self._out.write(text)
                self._out.flush()
            except (OSError, ValueError):  # it is gone
                self._on = False
            self._writing = False

        self._writing = off_loop.run(write)

    def _line(self) -> str:
        ended = [future for future in self._futures if future._ended]
        going = [future for future in self._futures if not future._ended]
        parts = [_progress_of(future) for future in going[:MOST_TRAINERS]]
        if len(going) > MOST_TRAINERS:
            parts.append(f'{len(going) - MOST_TRAINERS} more')
        if ended:
            states = sorted({future.state for future in ended})
            counts = (f'{sum(f.state == state for f in ended)} {state}' for state in states)
            parts.append(', '.join(counts))
        line = '; '.join(parts)
        return line[: shutil.get_terminal_size().columns - 1]


def _progress_of(future: TrainingFuture) -> str:
    progress = future.progress()
    total = f' of {progress.total_samples:,}' if progress.total_samples else ''
    nodes = f' on {progress.nodes} node{"s" * (progress.nodes != 1)}' if progress.nodes else ''
    name = main_metric(progress.metrics)
    loss = f', {name} {progress.metrics[name]:.4g}' if name else ''
    return f'{future.name} {future.state}{nodes}: {progress.samples:,}{total} samples{loss}'

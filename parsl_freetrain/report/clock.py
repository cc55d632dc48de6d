"""The time axis of a picture: seconds of all runs, without the time between them."""

from __future__ import annotations

from parsl_freetrain.core.model.state import History


class Clock:
    """Seconds since the start of the first run, runs one behind the other.

    Parameters
    ----------
    history
        Whose runs these are.
    now
        When the account of a run that is alive ends, in epoch seconds. Default: at its last entry.
    """

    def __init__(self, history: History, now: float | None) -> None:
        self.until = {r.id: history.until(r, now) for r in history.runs}
        self._begun = {r.id: r.begun_at for r in history.runs}
        self._offset: dict[int, float] = {}
        self.length = 0.0
        for run in history.runs:
            self._offset[run.id] = self.length
            self.length += self.until[run.id] - run.begun_at
        self.joints = [self._offset[r.id] for r in history.runs[1:]]

    def of(self, run: int, at: float) -> float:
        """An epoch second of a run, as this clock shows it; not before the run's start nor after
        its end.
        """
        return (
            self._offset[run] + min(max(at, self._begun[run]), self.until[run]) - self._begun[run]
        )

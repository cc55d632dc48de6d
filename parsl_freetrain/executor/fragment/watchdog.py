"""Checks running fragments against time limits, and decides what to do. It has no side effects."""

from collections.abc import Iterable
from typing import NamedTuple

from parsl_freetrain.executor.fragment.fragment_state import RunningFragment
from parsl_freetrain.executor.fragment.members import AHEAD_S
from parsl_freetrain.executor.settings import Timeouts

LOOK_S = 1.0  # maximum seconds between two checks
SOON_S = 0.1  # maximum seconds between two checks while a member has been asked whether it is there


class GiveUp(NamedTuple):
    fragment: RunningFragment
    why: str


class StopNow(NamedTuple):
    """Ask the fragment to stop now, without waiting any longer for standby ranks."""

    fragment: RunningFragment


class NodeSilent(NamedTuple):
    node: str
    why: str


class Watchdog:
    """Checks fragments every second, after all messages; not by time that nobody listened."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._looked_at: float | None = None
        self._again_s = LOOK_S

    def within_s(self, fragments: Iterable[RunningFragment]) -> float:
        fragments = list(fragments)
        if any(fragment.cut_off() for fragment in fragments):
            return 0.0
        return SOON_S if any(fragment.unanswered() for fragment in fragments) else LOOK_S

    def look(
        self, fragments: Iterable[RunningFragment], at: float
    ) -> list[GiveUp | StopNow | NodeSilent]:
        """What to do about fragments and nodes that exceed a limit at ``at``."""
        fragments = list(fragments)
        away_s = 0.0 if self._looked_at is None else at - self._looked_at - self._again_s
        late = away_s > self._again_s
        self._looked_at = at
        found: list[GiveUp | StopNow | NodeSilent] = []
        for fragment in fragments:
            if late:
                fragment.nobody_listened(away_s)
            if fragment.given_up.why and fragment.given_up.seen_at is None:
                fragment.given_up.seen_at = at
            silent = fragment.silent(at, self._timeouts.silence_s)
            found += [NodeSilent(*one) for one in silent.items()]
            if why := self._too_long(fragment, at):
                found.append(GiveUp(fragment, why))
            elif fragment.stopping.awaited and at - fragment.stopping.at > AHEAD_S:
                found.append(StopNow(fragment))
        self._again_s = max(SOON_S, self.within_s(fragments))
        return found

    def _too_long(self, fragment: RunningFragment, at: float) -> str:
        """Why a fragment must be given up; empty if it need not be."""
        limits = self._timeouts
        peer_s = max(limits.peer_s, limits.hang_s) if fragment.saving else limits.peer_s
        if fragment.trouble_at is not None and at - fragment.trouble_at > peer_s:
            return 'some of its ranks ended in trouble and the others did not notice'
        if why := fragment.deadlock(at):
            return why
        if fragment.stopping.awaited:
            return ''
        stop_s = limits.stop_s if fragment.stopping.grace_s is None else fragment.stopping.grace_s
        if fragment.stopping.why and at - fragment.stopping.at > stop_s:
            return f'it did not stop within {stop_s:g} s'
        if fragment.started_at is None and at - fragment.decided_at > limits.start_s:
            heard = fragment.contact.heard
            quiet = [fragment.action.nodes[m] for m in fragment.members if m not in heard]
            return f'it did not start within {limits.start_s:g} s' + (
                f'; nothing was heard from {", ".join(quiet)}' if quiet else ''
            )
        if fragment.stepped_at is not None and at - fragment.stepped_at > limits.step_s:
            return (
                f'no training step ended within {limits.step_s:g} s: its function is in an '
                'endless loop, or a step takes longer and needs a larger step_s of the executor; '
                f'see "freetrain logs {fragment.name}"'
            )
        return ''

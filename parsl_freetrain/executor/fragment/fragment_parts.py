"""What is kept of a fragment for one purpose each."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Stopping:
    """A request to stop.

    Attributes
    ----------
    why
        Why it was asked to stop; empty: it was not.
    at
        When.
    grace_s
        Seconds until it is killed after that; None: the usual patience.
    awaited
        Members whose ranks of the next fragment it is kept training for.
    goes_on
        Whether the trainer is expected to go on at once when it has stopped.
    followed
        Whether the ranks of the next fragment are ready.
    leaving
        Nodes of it that are given back when it has stopped.
    """

    why: str = ''
    at: float = 0.0
    grace_s: float | None = None
    awaited: set[int] = field(default_factory=set)
    goes_on: bool = False
    followed: bool = False
    leaving: frozenset[str] = frozenset()


@dataclass
class GivenUp:
    """That a fragment is to end at once.

    Attributes
    ----------
    why
        Empty: it goes on.
    seen_at
        When the watchdog first saw that.
    ended_before
        Ranks that had ended by then.
    spare_s
        Seconds that its ranks have for leaving their states in memory.
    """

    why: str = ''
    seen_at: float | None = None
    ended_before: frozenset[int] = frozenset()
    spare_s: float = 0.0


@dataclass
class Contact:
    """What is heard of the members.

    Attributes
    ----------
    names
        What people call their nodes.
    heard
        When they were last heard of.
    disconnected
        Those whose connection has ended, and that have not been heard of since.
    asked_at, asked_why
        When and why they were asked whether they are there.
    stuck
        By rank, the exchange in which it waits for too long, and when it last said so.
    """

    names: dict[int, str] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    disconnected: set[int] = field(default_factory=set)
    asked_at: float | None = None
    asked_why: str = ''
    stuck: dict[int, tuple[str, float]] = field(default_factory=dict)

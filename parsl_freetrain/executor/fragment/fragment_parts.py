"""What is kept of a fragment for one purpose each."""

from dataclasses import dataclass, field


@dataclass
class Stopping:
    why: str = ''  #: why it was asked to stop; empty: it was not
    at: float = 0.0  #: when
    grace_s: float | None = None  #: seconds until it is killed after that; None: the usual patience
    #: Members whose ranks of the next fragment it is kept training for.
    awaited: set[int] = field(default_factory=set)
    goes_on: bool = False  #: whether the trainer is expected to go on at once when it has stopped
    followed: bool = False  #: whether the ranks of the next fragment are ready
    leaving: frozenset[str] = frozenset()  #: nodes of it that are given back when it has stopped


@dataclass
class GivenUp:
    why: str = ''  #: empty: it goes on
    seen_at: float | None = None  #: when the watchdog first saw that
    ended_before: frozenset[int] = frozenset()  #: ranks that had ended by then
    spare_s: float = 0.0  #: seconds that its ranks have for leaving their states in memory


@dataclass
class Contact:
    names: dict[int, str] = field(default_factory=dict)  #: what people call their nodes
    heard: dict[int, float] = field(default_factory=dict)  #: when they were last heard of
    #: Those whose connection has ended, and that have not been heard of since.
    disconnected: set[int] = field(default_factory=set)
    #: asked_at, asked_why: when and why they were asked whether they are there.
    asked_at: float | None = None
    asked_why: str = ''
    #: By rank, the exchange in which it waits for too long, and when it last said so.
    stuck: dict[int, tuple[str, float]] = field(default_factory=dict)

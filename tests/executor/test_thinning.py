"""What happens many times a minute is recorded as often as it means something."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import Checkpoint, NodeOffer
from parsl_freetrain.executor.commands import OfferChanges
from parsl_freetrain.executor.fragment.fragment_state import RunningFragment
from parsl_freetrain.executor.fragment.listener import THINNED_S, Listener
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.training.spec.messages import FromMember


def keeping(events: list[Any]) -> Any:
    return SimpleNamespace(take=events.append, flush=None)


def test_reports_are_recorded_less_often_the_longer_a_fragment_trains() -> None:
    shown, recorded = list[Any](), list[Any]()
    nobody = SimpleNamespace(checkpoint=None, note_handed_in=lambda _: None)
    stream, no_members = Stream([keeping(shown)], [keeping(recorded)]), SimpleNamespace()
    listener: Any = Listener(no_members, stream)  # type: ignore[arg-type]
    fragment = RunningFragment(
        ev.StartFragment('a', 1, ('n',), None, 0), 0.0, Checkpoint('a', '', 0, 0)
    )
    for half in range(1, 20_001):
        report = ev.FragmentProgressed(half / 2, 'a', 1, half)
        listener.heard(FromMember('a', 1, 0, report), fragment, nobody, half / 2)
    times = [event.at for event in recorded]
    assert len(shown) == 20_000 and len(times) < 700
    assert times[:3] == [0.5, 1.0, 1.5]
    assert max(later - earlier for earlier, later in pairwise(times)) == THINNED_S
    assert list(stream.next_batch()) == recorded  # what is decided about can be replayed
    saved = ev.CheckpointSaved(10_000.0, Checkpoint('a', '/c', 20_000, 1))
    listener.heard(FromMember('a', 1, 0, saved), fragment, nobody, 10_000.0)
    assert [event.at for event in recorded[-2:]] == [10_000.0] * 2  # the last report first


def test_an_offer_is_recorded_when_it_begins_and_when_it_ends() -> None:
    changes = OfferChanges(stale_s=10.0)

    def new(at: float, *offers: tuple[str, float, float], last: bool = False) -> list[Any]:
        found = changes.new([NodeOffer(*offer) for offer in offers], at, last=last)
        return [(offer.node, offer.start, offer.end) for offer in found]

    assert new(5.0, ('x', 0.0, 5.0), ('y', 0.0, 5.0)) == [
        ('x', 0.0, math.inf), ('y', 0.0, math.inf)
    ]  # fmt: skip
    assert new(10.0, ('x', 0.0, 10.0), ('y', 0.0, 5.0)) == [('y', 0.0, 5.0)]
    assert new(12.0, ('x', 2.0, 12.0), ('y', 2.0, 5.0)) == []
    assert new(15.0, ('x', 4.0, 15.0), ('y', 4.0, 5.0), ('y', 12.0, 15.0)) == [
        ('y', 12.0, math.inf)
    ]
    assert new(30.0, ('x', 4.0, 15.0), ('y', 12.0, 15.0)) == [('x', 0.0, 15.0), ('y', 12.0, 15.0)]
    assert new(31.0, ('x', 4.0, 31.0), last=True) == [('x', 0.0, 31.0)]  # it was there all the time

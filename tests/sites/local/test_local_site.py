import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import BlockRequest, Hole, NodeOffer
from parsl_freetrain.sites.idle_schedule import IdleInterval, Schedule
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.protocols import HoleGone

BEGIN = 1_000_000.0

#   a ████████ 40      b ████████ 40 … 60 ██ 80     c     20 ██████████ 70
BOTH = IdleInterval(0, 40, 'a'), IdleInterval(0, 40, 'b')
SCHEDULE = Schedule([*BOTH, IdleInterval(60, 80, 'b'), IdleInterval(20, 70, 'c')])


class Clock:
    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> float:
        return self.now

    def at(self, schedule_s: float) -> None:
        self.now = BEGIN + schedule_s


class Blocks(LocalSite):
    """A site that remembers its blocks, which end at once."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.script_dir = self.folder.name

    def open(self, *names: str, **request: Any) -> str:
        return self.open_block(BlockRequest(len(names), names=names, **request), 'true', 'block')

    def options(self) -> list[Any]:
        """What the program of the block that was opened last was told."""
        script = max(Path(self.folder.name).glob('*.sh'), key=lambda path: path.name)
        *_, told, command = shlex.split(script.read_text())
        return [*json.loads(told), command]


def site(clock: Clock, **arguments: Any) -> Blocks:
    defaults: dict[str, Any] = {'nodes': 3, 'schedule': SCHEDULE, 'clock': clock}
    made = Blocks(**(defaults | arguments))
    made.start()
    return made


def test_nodes_that_join_together_are_one_hole() -> None:
    clock = Clock()
    local = site(clock)
    assert local.holes() == (Hole(2, names=('a', 'b')),)
    clock.at(20)
    assert local.holes() == (Hole(2, names=('a', 'b')), Hole(1, names=('c',)))
    clock.at(40)
    assert local.holes() == (Hole(1, names=('c',)),)
    clock.at(90)
    assert local.holes() == ()


def test_nodes_of_open_blocks_are_no_hole_and_come_back_together_when_the_block_is_gone() -> None:
    clock = Clock()
    local = site(clock)
    clock.at(20)
    job = local.open('b', 'c')
    assert local.holes() == (Hole(1, names=('a',)),)
    # b is taken at 40, and the block with it; nobody has noticed until 65, when b is idle again.
    clock.at(65)
    assert local.holes() == ()
    local.gone(job)
    assert local.holes() == (Hole(2, names=('b', 'c')),)
    local.gone(job)
    local.gone('of another site')


def test_known_ends_separate_nodes_that_join_together() -> None:
    clock = Clock()
    ends = [IdleInterval(0, end, name) for name, end in (('a', 40), ('b', 50), ('c', 50))]
    local = site(clock, schedule=Schedule(ends), taken='known')
    both = Hole(2, BEGIN + 50, names=('b', 'c'))
    assert local.holes() == (Hole(1, BEGIN + 40, names=('a',)), both)
    assert local.end_of(local.open('a', 'b')) == BEGIN + 40


def test_a_notice_makes_the_end_known() -> None:
    clock = Clock()
    local = site(clock, taken='notice', notice_s=10)
    job = local.open('a')
    clock.at(29.9)
    assert local.end_of(job) is None
    assert local.holes()[0].until_s is None
    clock.at(30)
    assert local.end_of(job) == BEGIN + 40
    assert Hole(1, BEGIN + 40, names=('b',)) in local.holes()


def test_kill_tells_no_end_but_that_of_the_walltime() -> None:
    clock = Clock()
    local = site(clock)
    unlimited, limited = local.open('a'), local.open('b', walltime_s=15)
    clock.at(39)
    assert local.end_of(unlimited) is None
    assert local.end_of(limited) == BEGIN + 15
    assert local.end_of('of another site') is None


def test_a_block_is_told_its_nodes_and_the_earliest_end() -> None:
    clock = Clock()
    local = site(clock)
    clock.at(20)
    local.gone(local.open('c', 'a'))
    _, _, end, _, _, nodes, command = local.options()
    assert (end, nodes, command) == (BEGIN + 40, ['c', 'a'], 'true')
    local.open('a', walltime_s=5)
    _, _, end, _, _, nodes, command = local.options()
    assert (end, nodes, command) == (BEGIN + 25, ['a'], 'true')


def test_mixed_draws_once_for_nodes_that_go_together() -> None:
    nodes = [f'n{i:03d}' for i in range(200)]
    schedule = Schedule(IdleInterval(0, 100 + i // 2, node) for i, node in enumerate(nodes))
    hows: dict[int, list[str]] = {}
    for seed in (0, 0, 1):
        local = site(Clock(), nodes=200, schedule=schedule, taken='mixed', seed=seed)
        known = {name for hole in local.holes() if hole.until_s is not None for name in hole.names}
        assert all(
            (a in known) == (b in known) for a, b in zip(nodes[::2], nodes[1::2], strict=True)
        )
        assert 4 <= len(known) <= 60
        hows.setdefault(seed, []).append(','.join(sorted(known)))
    assert hows[0][0] == hows[0][1] != hows[1][0]


def test_requests_that_come_too_late_and_those_that_never_can_be_met() -> None:
    local = site(Clock())
    local.open('a')
    for request in (BlockRequest(1, names=('a',)), BlockRequest(2), BlockRequest(1, names=('c',))):
        with pytest.raises(HoleGone, match='look at the holes again'):
            local.open_block(request, 'true', 'block')
    named = BlockRequest(2, names=('a',)), BlockRequest(1, names=('z',))
    for request in (BlockRequest(0), BlockRequest(4), *named):
        with pytest.raises(BadInput, match='at least one node|were asked for'):
            local.open_block(request, 'true', 'block')


def test_a_schedule_with_more_nodes_than_slots_gives_its_first_ones() -> None:
    assert site(Clock(), nodes=2).names == ('a', 'b')
    assert site(Clock(), nodes=8).names == ('a', 'b', 'c')
    assert site(Clock(), nodes=['c']).names == ('c',)


def test_without_a_schedule_every_slot_is_always_idle() -> None:
    clock = Clock()
    local = site(clock, nodes=3, schedule=None, taken='known')
    clock.at(10**9)
    assert local.holes() == (Hole(3, names=('slot00', 'slot01', 'slot02')),)
    assert local.over_at is None
    assert local.offers(BEGIN, BEGIN + 5)[0] == NodeOffer('slot00', BEGIN, BEGIN + 5)


def test_the_schedule_says_of_which_class_the_slots_are() -> None:
    schedule = Schedule(
        [IdleInterval(0, 9, 'a'), IdleInterval(0, 9, 'b'), IdleInterval(0, 9, 'c')],
        {'a': 'fast', 'b': 'slow', 'c': 'slow'},
    )
    site = LocalSite(2, schedule)
    site.start()
    assert site.classes == ('fast', 'slow')
    assert [(h.names, h.node_class) for h in site.holes()] == [(('a',), 'fast'), (('b',), 'slow')]


def test_time_factor_stretches_the_schedule() -> None:
    clock = Clock()
    local = site(clock, time_factor=0.5, taken='known')
    assert local.holes() == (Hole(2, BEGIN + 20, names=('a', 'b')),)
    assert local.over_at == BEGIN + 40


def test_offers_are_the_schedule_clipped() -> None:
    local = site(Clock())
    offers = ('a', 30, 40), ('b', 30, 40), ('b', 60, 65), ('c', 30, 65)
    expected = {NodeOffer(name, BEGIN + begin, BEGIN + end) for name, begin, end in offers}
    assert set(local.offers(BEGIN + 30, BEGIN + 65)) == expected


def test_nothing_is_offered_before_the_start_and_none_after_the_end_until_it_begins_anew() -> None:
    clock = Clock()
    local = LocalSite(3, SCHEDULE, clock=clock)
    assert local.holes() == ()
    assert local.offers(0, 2 * BEGIN) == ()
    local.start()
    local.close()
    assert local.holes() == ()
    clock.at(90)
    local.start()  # by another Parsl configuration
    assert local.holes() == (Hole(2, names=('a', 'b')),)


def test_a_site_that_cannot_work_says_so_at_once() -> None:
    for bad, says in (
        ({'nodes': 0}, 'at least 1'),
        ({'nodes': []}, 'at least 1'),
        ({'nodes': 'slot00'}, 'a whole number or a list'),
        ({'nodes': ['a', 'a']}, 'must differ'),
        ({'nodes': ['a', 'z']}, 'no idle interval of the nodes z'),
        ({'schedule': Schedule([])}, 'at least one node'),
        ({'time_factor': 0}, 'time_factor is 0'),
        ({'time_factor': -2.0}, 'above 0'),
        ({'taken': 'gently'}, "'kill' or 'notice' or"),
        ({'notice_s': -1}, 'notice_s is -1'),
        ({'poll_s': 0}, 'poll_s is 0'),
        ({'devices': 'all'}, "must be 'share' or 'own' or 'none'"),
        ({'class_speeds': {'slow': 0.5}}, "for the class 'slow'; it must have numbers"),
    ):
        good: dict[str, Any] = {'nodes': 3, 'schedule': SCHEDULE}
        with pytest.raises(BadInput) as raised:
            LocalSite(**(good | bad))
        assert says in str(raised.value)

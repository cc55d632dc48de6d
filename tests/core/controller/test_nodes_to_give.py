"""Nodes given back for waiting jobs: the fewest, least wanted, and cheapest to lose."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import strategies as st

from parsl_freetrain.core.allocation.solvers.equal_share import EqualShareAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.nodes_to_give import nodes_to_give
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockNodes, BlockRequest, Charge, NodeDemand, Trainer
from tests.support.properties import holds_for


def served(given: Collection[str], demands: Sequence[NodeDemand]) -> bool:
    """Whether every job gets nodes of its own (Hall's condition), or those that may be shared."""
    own = [demand for demand in demands if not demand.shared]
    return all(
        sum(demand.nodes for demand in some)
        <= len(set(given) & frozenset[str]().union(*(demand.among for demand in some)))
        for size in range(1, len(own) + 1)
        for some in combinations(own, size)
    ) and all(d.nodes <= len(set(given) & d.among) for d in demands if d.shared)


def servable(
    demands: Sequence[NodeDemand], sets: Sequence[frozenset[str]]
) -> tuple[NodeDemand, ...]:
    """Each demand that one of these sets of nodes can serve beside those before it."""
    kept: tuple[NodeDemand, ...] = ()
    for demand in demands:
        if any(served(some, (*kept, demand)) for some in sets):
            kept = *kept, demand
    return kept


def price(
    given: Collection[str],
    holder: Mapping[str, str],
    cost: Mapping[str, float],
    already: Collection[str],
    demands: Sequence[NodeDemand],
) -> tuple[int, int, float]:
    stopped = {holder[node] for node in given if node in holder}
    free = {holder[node] for node in already if node in holder}
    spare = frozenset[str]().union(*(demand.spare for demand in demands))
    new = set(given) - set(already)
    return len(new), len(new - spare), sum(cost[name] for name in stopped - free)


def allowed(given: frozenset[str], blocks: Sequence[BlockNodes]) -> bool:
    return all(
        given.issuperset(block.nodes) or given & set(block.nodes) <= block.releasable
        for block in blocks
    )


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[list[NodeDemand], list[BlockNodes], dict[str, str], dict[str, float], frozenset[str]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    blocks = []
    for b, size in enumerate(sizes):
        names = tuple(f'{b}.{i}' for i in range(size))
        alone = frozenset(names[1:]) if draw(st.booleans()) else frozenset[str]()
        blocks.append(BlockNodes(str(b), names, alone))
    every = [name for block in blocks for name in block.nodes]
    trainers = ('x', 'y', 'z')
    holder = {name: held for name in every if (held := draw(st.sampled_from(('', *trainers))))}
    cost = {name: float(draw(st.integers(0, 4))) for name in trainers}
    spare = frozenset(draw(st.sets(st.sampled_from(every))))
    demands = [
        NodeDemand(str(j), draw(st.integers(1, 3)), among, among & spare, draw(st.booleans()))
        for j in range(draw(st.integers(1, 3)))
        for among in [frozenset(draw(st.sets(st.sampled_from(every))))]
    ]
    # Only whole blocks and releasable nodes are ever being given back.
    already = frozenset(
        name
        for block in blocks
        for name in draw(st.sampled_from((block.releasable, frozenset(block.nodes), frozenset())))
    )
    return demands, blocks, holder, cost, already


@holds_for(situations(), tries=100)
def test_the_choice_is_the_best_of_all(
    situation: tuple[
        list[NodeDemand], list[BlockNodes], dict[str, str], dict[str, float], frozenset[str]
    ],
) -> None:
    demands, blocks, holder, cost, already = situation
    every = [name for block in blocks for name in block.nodes]
    sets = [frozenset(some) for size in range(len(every) + 1) for some in combinations(every, size)]
    found = nodes_to_give(demands, blocks, holder, cost, already)
    demands = list(servable(demands, sets))
    if not demands:
        assert found == frozenset()
        return
    assert served(found, demands) and allowed(found, blocks)
    allowed_sets = [s for s in sets if served(s, demands) and allowed(s, blocks)]
    best = min(price(chosen, holder, cost, already, demands) for chosen in allowed_sets)
    assert price(found, holder, cost, already, demands) == best


class TwoBlocks:
    """Blocks ``a`` of three nodes, which can be made smaller, and ``b`` of two, which cannot."""

    one = BlockNodes('a', ('a1', 'a2', 'a3'), frozenset({'a2', 'a3'}))
    blocks = one, BlockNodes('b', ('b1', 'b2'))

    def __init__(self) -> None:
        self.controller = Controller(EqualShareAllocator(), ControllerSettings(give_back_s=30.0))
        for block in self.blocks:
            self.tell(ev.BlockOpened(0.0, block.block, BlockRequest(len(block.nodes))))
            self.tell(ev.NodesJoined(0.0, block.block, block.nodes))

    def tell(self, event: ev.Event) -> tuple[ev.Action, ...]:
        return self.controller.handle(event).actions

    def need(self, at: float, nodes: int) -> tuple[ev.Action, ...]:
        among = frozenset(name for block in self.blocks for name in block.nodes)
        return self.tell(ev.NodesNeeded(at, (NodeDemand('7', nodes, among),), self.blocks))


WHY = 'job 7 waits for its nodes'


def test_free_nodes_are_given_at_once_and_nothing_else() -> None:
    [action] = TwoBlocks().need(1.0, 2)
    assert action in (ev.ReleaseNodes('a', ('a2', 'a3'), WHY), ev.CloseBlock('b', WHY))


def test_a_fragment_stops_before_its_node_is_given_back() -> None:
    history = TwoBlocks()
    [start] = history.tell(ev.TrainerSubmitted(1.0, Trainer('t', 1, 5)))
    assert isinstance(start, ev.StartFragment) and len(start.nodes) == 5
    [stop] = history.need(2.0, 1)
    assert stop == ev.StopFragment('t', 1, WHY)
    assert isinstance(stop, ev.StopFragment) and stop.leaving[0] in ('a2', 'a3')
    assert history.need(3.0, 1) == (), 'it is stopping already'
    [release] = history.tell(ev.FragmentEnded(4.0, 't', 1, 8, ev.Ending.STOPPED))
    assert release == ev.ReleaseNodes('a', stop.leaving, WHY), 'before anything is decided'
    [again] = history.tell(ev.NodesLeft(4.1, stop.leaving))
    assert isinstance(again, ev.StartFragment)
    assert set(again.nodes) == {'a1', 'a2', 'a3', 'b1', 'b2'} - set(stop.leaving)


def test_all_nodes_of_a_job_are_given_back_together_as_whole_blocks_where_they_must() -> None:
    history = TwoBlocks()
    history.tell(ev.TrainerSubmitted(1.0, Trainer('t', 1, 5)))
    [stop] = history.need(2.0, 5)
    assert stop == ev.StopFragment('t', 1, WHY)
    closing = history.tell(ev.FragmentEnded(4.0, 't', 1, 8, ev.Ending.STOPPED))
    assert closing == (ev.CloseBlock('a', WHY), ev.CloseBlock('b', WHY))


def test_a_fragment_that_does_not_stop_is_not_waited_for() -> None:
    history = TwoBlocks()
    history.tell(ev.TrainerSubmitted(1.0, Trainer('t', 1, 5)))
    history.need(2.0, 5)
    assert history.tell(ev.Tick(31.0)) == ()
    assert history.tell(ev.Tick(32.0)) == (ev.CloseBlock('a', WHY), ev.CloseBlock('b', WHY))


def test_a_later_end_of_a_block_takes_nothing_back_that_is_to_be_given() -> None:
    history = TwoBlocks()
    history.tell(ev.TrainerSubmitted(1.0, Trainer('t', 2, 2)))
    history.need(2.0, 4)
    for block in history.blocks:
        history.tell(ev.BlockEndKnown(3.0, block.block, 900.0))
    started = history.tell(ev.TrainerSubmitted(4.0, Trainer('u', 1, 5)))
    nodes = {node for one in started if isinstance(one, ev.StartFragment) for node in one.nodes}
    assert nodes.isdisjoint(history.controller.state.yielded)


def test_what_is_given_back_before_its_block_is_charged_until_then() -> None:
    history, two = TwoBlocks(), ('a2', 'a3')
    history.tell(ev.BlockOpened(0.0, 'a', BlockRequest(3, charge=Charge(1.0))))
    history.tell(ev.BlockStarted(0.0, 'a', 0.0))
    demand = NodeDemand('7', 2, frozenset(two))
    assert history.tell(ev.NodesNeeded(1800.0, (demand,), history.blocks))
    history.tell(ev.NodesLeft(1800.0, two))
    history.tell(ev.BlockClosed(3600.0, 'a'))
    assert round(history.controller.state.charges.charged, 6) == 2.0


def test_more_than_there_is_is_no_reason() -> None:
    history = TwoBlocks()
    history.tell(ev.TrainerSubmitted(1.0, Trainer('t', 1, 5)))
    assert history.need(2.0, 6) == ()


def test_nodes_that_the_scheduler_takes_serve_first_and_are_left_to_it() -> None:
    history = TwoBlocks()
    a, b = history.blocks
    everywhere = frozenset(a.nodes + b.nodes)
    only_a = NodeDemand('8', 1, frozenset(a.nodes))
    blocks = a, replace(b, leaving=True)
    need = ev.NodesNeeded(1.0, (NodeDemand('7', 2, everywhere),), blocks)
    assert history.tell(need) == (), 'block b serves it'
    need = ev.NodesNeeded(2.0, (only_a, NodeDemand('7', 2, everywhere)), blocks)
    [release] = history.tell(need)
    assert isinstance(release, ev.ReleaseNodes)
    assert (release.block, len(release.nodes)) == ('a', 1)


def test_the_nodes_that_the_scheduler_gives_first_go_first() -> None:
    """It leaves the same to later jobs then; what is spare goes before."""
    blocks = [BlockNodes(name, (name,)) for name in 'abc']
    cost = {'one': 0.0, 'two': 100.0}
    for first, spare in (('b', ''), ('a', 'b'), ('a', 'ab')):
        demand = NodeDemand('7', 1, frozenset('abc'), frozenset(spare), first=frozenset(first))
        given = nodes_to_give([demand], blocks, {'a': 'two', 'b': 'two', 'c': 'one'}, cost)
        assert given == {'a' if spare == 'ab' else 'b'}

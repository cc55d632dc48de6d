"""What nodes cost limits which blocks are opened; exempt time reaches the fragments."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest, Charge, Hole, Trainer
from tests.core.controller.test_block_policy import opened as offer

QUARTER = Charge(0.25, 7200.0, 1.0)  # as Perlmutter's preempt


def controller(*trainers: Trainer, **settings: float) -> Controller:
    made = Controller(MilpAllocator(), ControllerSettings(**settings))  # type: ignore[arg-type]
    for trainer in trainers or (Trainer('a', 1, 64),):
        made.handle(ev.TrainerSubmitted(0.0, trainer))
    return made


def test_what_a_node_costs() -> None:
    for charge, lasts_s, cost in (
        (QUARTER, 60.0, 2.0),  # the least is paid in any case
        (QUARTER, 4 * 3600.0, 2.5),
        (Charge(2.0), 1800.0, 1.0),
        (Charge(), math.inf, 0.0),
        (Charge(1.0), math.inf, math.inf),
    ):
        assert charge.cost(1, lasts_s) == pytest.approx(cost)
        assert charge.cost(3, lasts_s) == pytest.approx(3 * cost)


def test_cheaper_nodes_are_taken_first_and_dear_ones_not_at_all() -> None:
    dear = Hole(8, 3600.0, 'dear', charge=Charge(2.0))
    cheap = Hole(4, 3600.0, 'cheap', charge=Charge(0.5))
    assert [r.queue for r in offer(controller(), dear, cheap)] == ['cheap', 'dear']
    assert [r.queue for r in offer(controller(max_price=1.0), dear, cheap)] == ['cheap']
    # The minimum charge makes a short block dear.
    short, long = (Hole(4, s, charge=QUARTER) for s in (3600.0, 20 * 3600.0))
    assert [r.lasts_s for r in offer(controller(max_price=0.5), short, long)] == [20 * 3600.0]


def test_no_more_nodes_are_asked_for_than_can_be_paid() -> None:
    made = controller(charge_budget=10.0)
    [request] = offer(made, Hole(64, None, charge=Charge(1.0), longest_s=7200.0))
    assert (request.nodes, request.walltime_s, request.lasts_s) == (5, None, 7200.0)
    made.handle(ev.BlockOpened(0.0, 'b', request))
    assert offer(made, Hole(64, 3600.0, charge=Charge(1.0))) == []
    # It ended early: what it has not used can be used again.
    made.handle_all((ev.BlockStarted(100.0, 'b', 90.0), ev.BlockClosed(3690.0, 'b')))
    assert made.state.charges.charged == pytest.approx(5.0)
    [request] = offer(made, Hole(64, 3690.0 + 1800.0, charge=Charge(1.0)), at=3690.0)
    assert request.nodes == 10


def test_holes_without_an_end_that_cost_something_are_used_where_no_budget_forbids_it() -> None:
    endless, made = Hole(4, None, charge=Charge(1.0)), controller(charge_budget=10.0)
    every = offer(controller(), endless, endless)
    made.handle_all([ev.BlockOpened(0.0, str(n), request) for n, request in enumerate(every)])
    assert (len(every), offer(made, endless)) == (2, [])


def test_a_block_that_never_started_costs_nothing() -> None:
    made = controller(charge_budget=10.0)
    [request] = offer(made, Hole(4, 3600.0, charge=QUARTER))
    made.handle_all((ev.BlockOpened(0.0, 'b', request), ev.BlockClosed(99.0, 'b')))
    assert made.state.charges.charged == 0.0


def test_trainers_end_with_a_sentence_when_nothing_can_be_paid_any_more() -> None:
    made = controller(charge_budget=3.0)
    made.state.charges.charged = 2.5
    [end] = made.handle(ev.HolesSeen(0.0, (Hole(8, 3600.0, charge=Charge(1.0)),))).actions
    assert isinstance(end, ev.EndTrainer) and end.state == 'failed'
    assert '2.5 of charge_budget=3 are charged' in end.why and '1 node for 3600 s' in end.why
    dear = ev.HolesSeen(0.0, (Hole(8, 3600.0, charge=Charge(1.0)),))
    [end] = controller(max_price=0.5).handle(dear).actions
    assert isinstance(end, ev.EndTrainer)
    assert 'a node costs at least 1 an hour, above max_price=0.5' in end.why


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),  # nodes
            st.floats(100.0, 1e5),  # length of the hole
            st.floats(0.0, 300.0),  # until it starts
            st.floats(0.0, 1.0),  # the share of its time after which it ends
            st.sampled_from((QUARTER, Charge(1.0), Charge(0.5, 600.0, 2.0))),
            st.booleans(),  # it is over before the next one is asked for
        ),
        max_size=12,
    ),
    st.floats(0.0, 100.0),
)
def test_the_budget_is_never_exceeded(
    offers: list[tuple[int, float, float, float, Charge, bool]], budget: float
) -> None:
    made = controller(charge_budget=budget)
    truth, at, later = 0.0, 0.0, []
    for number, (nodes, length_s, wait_s, share, charge, now) in enumerate(offers):
        for request in offer(made, Hole(nodes, at + length_s, charge=charge), at=at):
            name = f'b{number}'
            made.handle(ev.BlockOpened(at, name, request))
            truth += charge.cost(request.nodes, share * request.lasts_s)
            # It is known to have started when it is seen, not when it did.
            end = at + wait_s + share * request.lasts_s
            events = ev.BlockStarted(end, name, at), ev.BlockClosed(end, name)
            if now:
                at = end
                made.handle_all(events)
            else:
                later.append(events)
    assert truth <= budget + 1e-6
    for events in later:
        made.handle_all(events)
    assert truth <= made.state.charges.charged + 1e-6


def test_a_fragment_is_told_until_when_nothing_preempts_it() -> None:
    made = controller()
    request = BlockRequest(2, 3600.0, exempt_s=600.0)
    opened = ev.BlockOpened(10.0, 'b', request), ev.BlockStarted(10.0, 'b', 4.0)
    started = made.handle_all((*opened, ev.NodesJoined(10.0, 'b', ('n1', 'n2'), 3600.0))).actions
    [start] = [action for action in started if isinstance(action, ev.StartFragment)]
    assert start.exempt_until_s == 604.0
    # Nodes of a block whose start is not known may be preempted.
    assert made.state.exempt_until(('n1',), 700.0) is None

"""What a trainer waits for, and a decision in words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from parsl_freetrain.core.allocation.constraints import KEPT_FREE
from parsl_freetrain.core.allocation.explain import Alternative, Reason
from parsl_freetrain.core.allocation.problem import Limit, Problem, record_of
from parsl_freetrain.ledger.rows import (
    BlockRow,
    FragmentRow,
    NodeRow,
    RunHistory,
    RunRow,
    TrainerRow,
)
from parsl_freetrain.report.reasons import DecisionAbout, decision_about, in_words, waits_for

RUN = RunRow(1, 'r', 0.0, None, None, 100.0)
ME = TrainerRow(1, 'me', 10.0, {'min_nodes': 2}, 100, 0, 0, 'queued', 10.0)
BLOCK = BlockRow(1, 'b0', 5.0, nodes=4)
NODE = NodeRow(1, 'b0/x', 'b0', 'x', 6.0)
HERE = {'blocks': (BLOCK,), 'nodes': (NODE,)}


def limited(*limits: Limit, nodes: int = 4, others: int = 1) -> dict[str, Any]:
    """A decision that gave this trainer nothing, and whose problem had limits."""
    problem = record_of(Problem(120.0, nodes, (), limits=limits))
    return decided(nodes=nodes, me=0, you=others) | {'problem': problem}


def decided(at: float = 50.0, nodes: int = 4, **allocation: int) -> dict[str, Any]:
    return {
        'at': at,
        'trigger': 'NodesJoined+TrainerSubmitted',
        'nodes': nodes,
        'status': 'optimal',
        'solver': 'dp',
        'objective': 300.0,
        'staying': 200.0,
        'current': {'me': 0, 'you': 1},
        'allocation': allocation,
        'actions': (),
        'problem': record_of(Problem(120.0, nodes, ())),
    }


@pytest.mark.parametrize(
    ('rows', 'decisions', 'refusals', 'says'),
    [
        ({}, [], [], 'It waits for a hole: the site offers no nodes now'),
        (
            {},
            [],
            [{'at': 90.0, 'detail': {'nodes': 3, 'error': 'QOSMaxJobs.'}}],
            'the site refused a block of 3 nodes 10 s ago: QOSMaxJobs.',
        ),
        ({}, [], [{'at': -900.0, 'detail': {}}], 'It waits for a hole'),
        ({'blocks': (BLOCK,)}, [], [], 'a block with 4 nodes is asked for and not ready yet'),
        ({'blocks': (BLOCK, BLOCK)}, [], [], '2 blocks with 8 nodes are asked for'),
        (HERE, [], [], 'the next decision'),
        (HERE, [decided(at=9.0, me=0)], [], 'the next decision'),
        (HERE, [decided(you=4)], [], 'waits for its turn: .* Now: you'),
        (HERE, [decided(me=3, you=1)], [], 'will get 3 nodes as soon as'),
        (HERE, [decided(nodes=1, me=0, you=1)], [], 'needs 2 at least, and there is 1'),
        (HERE, [decided(me=0, you=4)], [], "others do more with the pool's 4 nodes: 'you' 4"),
        (HERE, [decided(me=0, you=1) | {'problem': None}], [], 'others do more'),
        (
            HERE,
            [limited(Limit(('me', 'you'), most=2, why='user anna'))],
            [],
            'no more than 2 nodes may go to user anna at once, and it needs 2 at least; '
            "now these have nodes: 'you' 1",
        ),
        (
            HERE,
            [limited(Limit(('me', 'you'), most=3), Limit(('it',), most=1))],
            [],
            'others do more',
        ),
        (
            HERE,
            [limited(Limit(most=2, why='max_nodes'))],
            [],
            'the executor uses no more than 2 nodes',
        ),
        (HERE, [limited(Limit(most=2, why=KEPT_FREE))], [], "2 nodes of the pool's 4"),
        (HERE, [limited(Limit(most=3, why=KEPT_FREE), others=3)], [], 'others do more'),
    ],
)
def test_what_it_waits_for(
    rows: dict[str, Any], decisions: list[dict[str, Any]], refusals: list[dict[str, Any]], says: str
) -> None:
    found = waits_for(
        RunHistory(runs=(RUN,), trainers=(ME,), latest=1, **rows),
        RUN,
        ME,
        decisions,
        refusals,
        100.0,
    )
    assert found is not None and re.search(says, found), found


def test_a_trainer_without_nodes_hears_which_jobs_they_were_given_back_for() -> None:
    jobs = ('3', 'reservation course', '3')  # by name and besides
    needs = [{'at': 70.0, 'detail': {'demands': [{'job': job, 'nodes': 2} for job in jobs]}}]
    queued = RunHistory(runs=(RUN,), trainers=(ME,), latest=1)
    said = waits_for(queued, RUN, ME, [], [], 100.0, needs) or ''
    assert said.endswith('30 s ago nodes were given back for others: job 3, reservation course.')
    assert 'given back' not in (waits_for(queued, RUN, ME, [], [], 900.0, needs) or '')


def test_one_that_trains_or_is_over_waits_for_nothing() -> None:
    running = RunHistory(runs=(RUN,), fragments=(FragmentRow(1, 'me', 1, 20.0),), latest=1)
    assert waits_for(running, RUN, ME, [], [], 100.0) is None
    over = TrainerRow(1, 'me', 10.0, {}, 100, 0, 100, 'finished', 50.0)
    assert waits_for(RunHistory(runs=(RUN,), latest=1), RUN, over, [], [], 100.0) is None


@pytest.mark.parametrize(
    ('alternative', 'says'),
    [
        (None, 'no way to give it another'),
        (Alternative(2, 300.0, 0.0), '2 nodes for it would be as good'),
        (
            Alternative(1, 280.0, 20.0),
            'its next best choice is 1 node; all trainers together would then be worth 20 less',
        ),
    ],
)
def test_a_decision_in_words(alternative: Alternative | None, says: str) -> None:
    about = decision_about(
        'me', decided(me=3, you=1), 62.0, Reason('me', 0, 3, 0.0, 250.0, 250.0, 5.0, alternative)
    )
    first, second, third = in_words('me', about)
    assert about.ago_s == 12.0
    assert (
        first == "nodes joined, a trainer was submitted; there are 4 nodes to give away. 'me' goes "
        "from 0 to 3 nodes; 'you' 1."
    )
    assert (
        second == 'In all this is worth 300 over the next 120 s, 100 more than changing nothing '
        '(optimal, by dp).'
    )
    assert third.startswith("To 'me' it is worth 250, keeping what it had 0; ") and says in third


def test_a_decision_whose_problem_was_not_kept() -> None:
    about: DecisionAbout = decision_about(
        'me', {**decided(me=0, **{f't{i}': i + 1 for i in range(8)}), 'problem': None}, 62.0
    )
    lines = in_words('me', about)
    assert (
        len(lines) == 2
        and "'t7' 8, 't6' 7, 't5' 6, 't4' 5, 't3' 4 and 3 more" in lines[0]
        and about.worth is None
    )


def test_a_decision_without_proof_says_how_far_from_the_optimum_it_may_be() -> None:
    row = decided(me=3, you=1) | {'status': 'feasible', 'solver': 'columns', 'bound': 303.0}
    assert (
        '(within 0.99 % of the optimum, by columns)'
        in in_words('me', decision_about('me', row, 62.0))[1]
    )

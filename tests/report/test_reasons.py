"""What a trainer waits for, and a decision in words."""

import re

import pytest
from msgspec import structs

from parsl_freetrain.core.allocation.constraints import KEPT_FREE
from parsl_freetrain.core.allocation.explain import Alternative, Reason
from parsl_freetrain.core.allocation.problem import Limit, Problem, record_of
from parsl_freetrain.core.model.events import BlockRefused, Decided, NodesNeeded, RoundKnown, packed
from parsl_freetrain.core.model.state import Training
from parsl_freetrain.core.model.types import NodeDemand
from parsl_freetrain.report.reasons import decision_about, in_words, waits_for
from tests.support.told import Told


def told(blocks: int = 0, node: bool = False) -> Told:
    """A run with a trainer ``me`` that needs 2 nodes."""
    run = Told()
    run.begin_run('r', at=0.0)
    run.submitted('me', at=10.0, spec={'min_nodes': 2}, total_samples=100)
    for number in range(blocks or node):
        run.block_opened(f'b{number}', at=5.0, nodes=4)
    if node:
        run.joined('b0/x', at=6.0, block='b0', name='x')
    return run


def waits(run: Told, now: float = 100.0) -> str | None:
    [one] = run.history.runs
    return waits_for(one, me(run), now)


def me(run: Told) -> Training:
    return run.history.runs[0].trainers['me']


def limited(*limits: Limit, nodes: int = 4, others: int = 1) -> Decided:
    """A decision that gave this trainer nothing, and whose problem had limits."""
    problem = Problem(120.0, nodes, (), limits=limits)
    return decided(problem=problem, nodes=nodes, me=0, you=others)


def decided(
    at: float = 50.0, nodes: int = 4, problem: Problem | None = None, **allocation: int
) -> Decided:
    record = record_of(problem or Problem(120.0, nodes, ()))
    return Decided(
        at, (), 'NodesJoined+TrainerSubmitted', nodes, 'optimal', 'dp', 300.0, None, 200.0, 0.0,
        {'me': 0, 'you': 1}, allocation, packed(record),
    )  # fmt: skip


def test_which_nodes_it_waits_for() -> None:
    for blocks, refused, says in (
        (0, None, 'It waits for a hole: the site offers no nodes now'),
        (
            0,
            BlockRefused(90.0, 3, 60.0, 'QOSMaxJobs.'),
            'the site refused a block of 3 nodes 10 s ago: QOSMaxJobs.',
        ),
        (0, BlockRefused(-900.0, 1, 60.0, ''), 'It waits for a hole'),
        (1, None, 'a block with 4 nodes is asked for and not ready yet'),
        (2, None, '2 blocks with 8 nodes are asked for'),
    ):
        run = told(blocks)
        if refused is not None:
            run.take(refused)
        assert says in (waits(run) or '')


def test_what_it_waits_for() -> None:
    for decision, says in (
        (None, 'the next decision'),
        (decided(at=9.0, me=0), 'the next decision'),
        (decided(you=4), 'waits for its turn: .* Now: you'),
        (decided(me=3, you=1), 'will get 3 nodes as soon as'),
        (decided(nodes=1, me=0, you=1), 'needs 2 at least, and there is 1'),
        (decided(me=0, you=4), "others do more with the pool's 4 nodes: 'you' 4"),
        (structs.replace(decided(me=0, you=1), problem=b''), 'others do more'),
        (
            limited(Limit(('me', 'you'), most=2, why='user anna')),
            'no more than 2 nodes may go to user anna at once, and it needs 2 at least; '
            "now these have nodes: 'you' 1",
        ),
        (limited(Limit(('me', 'you'), most=3), Limit(('it',), most=1)), 'others do more'),
        (limited(Limit(most=2, why='max_nodes')), 'the executor uses no more than 2 nodes'),
        (limited(Limit(most=2, why=KEPT_FREE)), "2 nodes of the pool's 4"),
        (limited(Limit(most=3, why=KEPT_FREE), others=3), 'others do more'),
    ):
        run = told(node=True)
        if decision is not None:
            run.take(decision)
        assert re.search(says, waits(run) or '')


def test_a_trainer_without_nodes_hears_which_jobs_they_were_given_back_for() -> None:
    run = told()
    jobs = ('3', 'reservation course', '3')  # by name and besides
    run.take(NodesNeeded(70.0, tuple(NodeDemand(job, 2, frozenset()) for job in jobs), ()))
    said = waits(run) or ''
    assert said.endswith('30 s ago nodes were given back for others: job 3, reservation course.')
    assert 'given back' not in (waits(run, 900.0) or '')


def test_a_replica_waits_for_those_that_have_not_ended_the_round() -> None:
    run = Told()
    run.begin_run('r', at=0.0)
    for replica, samples in enumerate((20, 5, 39)):
        spec = {'training': 'gpt', 'replicas': 3, 'overlap': 0}
        run.submitted(f'r{replica}', at=1.0, spec=spec, total_samples=80, samples=samples)
    run.take(RoundKnown(2.0, 'r2', 20, made_by=1))
    one = run.history.runs[0]
    assert waits_for(one, one.trainers['r0'], 100.0) == (
        'It waits at the end of round 1 for 1 other replicas: r1. '
        'The last outer step was made by replica 1.'
    )
    assert 'replicas' not in (waits_for(one, one.trainers['r1'], 100.0) or '')


def test_one_that_trains_or_is_over_waits_for_nothing() -> None:
    run = told()
    run.fragment_decided('me', 1, at=20.0, nodes=['x'])
    assert waits(run) is None
    run.fragment_ended('me', 1, at=50.0, ending='finished', samples=100)
    run.over('me', at=50.0, state='finished')
    assert waits(run) is None


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
    assert about['ago_s'] == 12.0
    assert (
        first == "nodes joined, a trainer was submitted; there are 4 nodes to give away. 'me' goes "
        "from 0 to 3 nodes; 'you' 1."
    )
    worth = 'In all this is worth 300 over the next 120 s, 100 more than changing nothing'
    assert second == f'{worth} (optimal, by dp).'
    assert third.startswith("To 'me' it is worth 250, keeping what it had 0; ") and says in third


def test_a_decision_whose_problem_was_not_kept() -> None:
    given = {'me': 0, **{f't{i}': i + 1 for i in range(8)}}
    about = decision_about('me', structs.replace(decided(), allocation=given, problem=b''), 62.0)
    lines = in_words('me', about)
    assert (
        len(lines) == 2
        and "'t7' 8, 't6' 7, 't5' 6, 't4' 5, 't3' 4 and 3 more" in lines[0]
        and about['worth'] is None
    )


def test_a_decision_without_proof_says_how_far_from_the_optimum_it_may_be() -> None:
    row = structs.replace(decided(me=3, you=1), status='feasible', solver='columns', bound=303.0)
    words = in_words('me', decision_about('me', row, 62.0))
    assert '(within 0.99 % of the optimum, by columns)' in words[1]

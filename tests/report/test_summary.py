"""The summary of a history whose numbers are known; budgets and shares in ``freetrain status``."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from parsl_freetrain.cli.live.view import LiveView, Screen
from parsl_freetrain.core.allocation.problem import Answer, Problem
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.settings import ControllerSettings, DecisionSettings
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.status import LimitNow, as_document
from parsl_freetrain.report.summary import CachedAllocator, RunEfficiency, efficiency, summary
from parsl_freetrain.report.timeline import node_seconds_of
from tests.support.journals import demo_journal
from tests.support.told import Told

SPEC = {'min_nodes': 1, 'max_nodes': 4, 'curve': {'nodes': [0, 1, 2, 4], 'rate': [0, 10, 16, 24]}}


def two_fragments(path: Path, *, end: bool = True) -> Path:
    """100 s on 2 nodes: a fragment that is killed after a checkpoint, then one on the node left."""
    ledger = Told(path)
    ledger.begin_run('r0', at=1000)
    ledger.offered([('x', 1000, 1100), ('y', 1000, 1050)])
    ledger.submitted('a', at=1000, spec=SPEC, total_samples=2000)
    for block, name in (('b0', 'x'), ('b1', 'y')):
        ledger.block_opened(block, at=1001, names=[name])
        ledger.joined(f'{block}/{name}', at=1004, block=block, name=name)
    ledger.fragment_decided('a', 1, at=1005, nodes=['b0/x', 'b1/y'])
    ledger.fragment_started('a', 1, at=1007, samples=0)
    ledger.checkpoint('a', 1, at=1027, samples=300, seconds=2.0, pause_s=2.0)
    ledger.fragment_progress('a', 1, at=1049, samples=640, rate=16.0, metrics={'loss': 1.0})
    ledger.left('b1/y', at=1047, how='taken')
    ledger.block_closed('b1', at=1047.5, how='taken')
    ledger.fragment_ended('a', 1, at=1049, ending='preempted', samples=300, reached=640)
    ledger.fragment_decided('a', 2, at=1050, nodes=['b0/x'], from_samples=300)
    ledger.fragment_started('a', 2, at=1051, samples=300)
    ledger.fragment_progress('a', 2, at=1081, samples=600, rate=10.0, metrics={'loss': 0.5})
    if end:
        kept = {'samples': 690, 'resumes': 3, 'verified': 2}
        ledger.checkpoint('a', 2, at=1091, seconds=1.0, pause_s=1.0, **kept)
        ledger.fragment_ended('a', 2, at=1091, ending='stopped', samples=690, reached=690)
        ledger.end_run(at=1100, how='interrupted')
    ledger.close()
    return path


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    with Journal(two_fragments(tmp_path / 'l.db')) as journal:
        found = summary(journal.history())
        assert found['node_s'] == node_seconds_of(journal.history('r0'))
    assert found['trainers']['a'] == {
        'fragments': 2, 'fragments_started': 2, 'why': '', 'preempted': 1, 'failed': 0,
        'rescaled': 1, 'resumes': 3, 'verified': 2, 'checkpoints': 2, 'samples': 690,
        'samples_expected': 2000, 'samples_repeated': 340, 'state': 'queued',
    }  # fmt: skip
    assert (found['blocks'], found['blocks_killed'], found['wall_s']) == (2, 1, 100)
    assert found['node_s'] == {
        'offered': 150,
        'starting': 2 * 3 + 2 * 2 + 1,
        'trained': 2 * 18 + 39,
        'checkpointing': 2 * 2 + 1,
        'lost': 20 + 22,  # y until it left, x until the fragment was over
        'idle': 2 * 1
        + 2 * 1
        + 3
        + 1
        + 9,  # before the blocks, before the fragment, y to its offer's end, x after each fragment
    }


@pytest.mark.parametrize(
    ('ending', 'trained', 'lost'), [('stopped', 98.0, 0.0), ('preempted', 50.0 - 12.0, 60.0)]
)
def test_training_goes_on_while_a_checkpoint_is_written_beside_it(
    tmp_path: Path, ending: str, trained: float, lost: float
) -> None:
    """Copied from 38 to 40 s, written until 50 s: what is trained meanwhile is not in it."""
    ledger = Told(tmp_path / 'l.db')
    ledger.begin_run('r0', at=1000)
    ledger.offered([('x', 1000, 1100)])
    ledger.submitted('a', at=1000, spec=SPEC, total_samples=2000)
    ledger.joined('b0/x', at=1000, block='b0', name='x')
    ledger.fragment_decided('a', 1, at=1000, nodes=['b0/x'])
    ledger.fragment_started('a', 1, at=1000, samples=0)
    ledger.checkpoint('a', 1, at=1050, samples=380, seconds=10, pause_s=2)
    ledger.fragment_ended('a', 1, at=1100, ending=ending, samples=380, reached=980)
    ledger.end_run(at=1100, how='done')
    ledger.close()
    with Journal(tmp_path / 'l.db') as journal:
        found = node_seconds_of(journal.history())
    assert (found['checkpointing'], found['trained'], found['lost']) == (2.0, trained, lost)


def test_a_run_that_was_cut_off_loses_what_its_fragment_did_not_save(tmp_path: Path) -> None:
    path = two_fragments(tmp_path / 'l.db', end=False)
    with Journal(path) as journal:
        # It may still be kept.
        assert summary(journal.history())['trainers']['a']['samples_repeated'] == 340
        assert summary(journal.history(), 1090.0)['wall_s'] == 90
        assert node_seconds_of(journal.history(), 1090.0)['lost'] == 42
    ledger = Told(path)
    ledger.begin_run('r1', at=5000)
    ledger.offered([('x', 5000, 9999)])
    ledger.submitted('a', at=5000, spec=SPEC, total_samples=2000, samples=300)
    ledger.fragment_decided('a', 2, at=5001, nodes=['b0/x'], from_samples=200)
    ledger.end_run(at=5010, how='done')
    ledger.close()
    with Journal(path) as journal:
        found = summary(journal.history(), 6000.0)
        assert summary(journal.history('r1'))['trainers']['a']['fragments'] == 1
    # 340 of the killed one, 300 of the one that was cut off, 100 because an older checkpoint was
    # used.
    assert found['trainers']['a']['samples_repeated'] == 740
    # Killed, cut off, and never ended by a run that has.
    assert found['trainers']['a']['preempted'] == 3
    assert found['wall_s'] == 81 + 10
    assert found['node_s']['lost'] == 42 + 30
    assert found['node_s']['offered'] == 81 + 50 + 10


def test_efficiency_by_hand(tmp_path: Path) -> None:
    with Journal(two_fragments(tmp_path / 'l.db')) as journal:
        # The pool: 150 node-seconds in 100 s, all a's: between the 10 per second of one node and
        # the 16 of two.
        assert efficiency(journal.history(), 1100.0, MilpAllocator()).by_trainer[
            'a'
        ] == pytest.approx((16 * 18 + 10 * 39) / (13 * 100))
        # Before anything trained, and before anything was there.
        assert efficiency(journal.history('r0'), 999.0, MilpAllocator()) == efficiency(
            journal.history(), 1100.0, MilpAllocator()
        )


def test_efficiency_shares_the_constant_pool_while_trainers_are_active(tmp_path: Path) -> None:
    ledger = Told(tmp_path / 'l.db')
    ledger.begin_run('r0', at=0)
    ledger.offered([(n, 0, None) for n in 'wxyz'])
    for name in ('a', 'b', 'late'):
        curve = {} if name == 'late' else {'curve': {'nodes': [2, 4], 'rate': [20, 22]}}
        at, spec = 80 if name == 'late' else 0, {'max_nodes': 4, **curve}
        ledger.submitted(name, at=at, spec=spec, total_samples=9)
        ledger.fragment_decided(name, 1, at=80 if name == 'late' else 0, nodes=['w', 'x'])
        ledger.fragment_started(name, 1, at=80 if name == 'late' else 0, samples=0)
    for name in ('a', 'b'):
        ledger.fragment_ended(name, 1, at=50, ending='finished', samples=9, reached=9)
        ledger.over(name, at=50, state='finished')
    ledger.commit()
    asked: list[Problem] = []

    class Counting:
        def allocate(self, problem: Problem) -> Answer:
            asked.append(problem)
            return MilpAllocator().allocate(problem)

    remembering = CachedAllocator(Counting())
    with Journal(tmp_path / 'l.db') as journal:
        for _ in range(3):
            found = efficiency(journal.history(), 100.0, remembering)
    ledger.close()
    # Two nodes each is what the constant pool gives a and b too; late trains on 2 of the 4 it would
    # have.
    assert found.by_trainer == pytest.approx({'a': 1.0, 'b': 1.0, 'late': 0.5})
    # In speeds of one node: twice 100 node-s and 40, of twice 100 and 80.
    assert found.of_run == pytest.approx(240 / 280)
    assert [tuple(b.name for b in p.bids) for p in asked] == [('a', 'b'), ('late',)]


def pooled(
    path: Path, pool: str, trainers: dict[str, tuple[str, dict[str, object]]]
) -> dict[str, float | None]:
    """The efficiency of trainers, each with its nodes of the pool and its spec, after 50 s."""
    ledger = Told(path)
    ledger.begin_run('r0', at=0)
    ledger.offered([(node, 0, None) for node in pool])
    for name, (nodes, spec) in trainers.items():
        ledger.submitted(name, at=0, spec=spec, total_samples=9)
        ledger.fragment_decided(name, 1, at=0, nodes=list(nodes))
        ledger.fragment_started(name, 1, at=0, samples=0)
    ledger.commit()
    with Journal(path) as journal:
        found = efficiency(journal.history(), 50.0, MilpAllocator()).by_trainer
    ledger.close()
    return found


def test_where_any_division_of_the_pool_is_as_good_it_is_even(tmp_path: Path) -> None:
    one, other = ({'nodes': [1, 6], 'rate': [rate, 6 * rate]} for rate in (1, 500))
    trainers: dict[str, tuple[str, dict[str, object]]] = {
        'a': ('uv', {'max_nodes': 6}),
        'b': ('wx', {'max_nodes': 6, 'curve': one}),
        'c': ('yz', {'max_nodes': 6, 'curve': other}),
    }
    found = pooled(tmp_path / 'l.db', 'uvwxyz', trainers)
    assert found == {name: pytest.approx(1.0) for name in 'abc'}


def test_equal_trainers_take_turns_with_an_odd_node(tmp_path: Path) -> None:
    spec = {'max_nodes': 4, 'curve': {'nodes': [1, 2, 3, 4], 'rate': [1, 1.9, 2, 3.4]}}
    found = pooled(tmp_path / 'l.db', 'vwxyz', {'a': ('vw', spec), 'b': ('xy', spec)})
    assert found == {name: pytest.approx(1.9 / ((1 + 3.4) / 2)) for name in 'ab'}


def test_efficiency_of_one_epoch_is_left_out(tmp_path: Path) -> None:
    ledger = Told(tmp_path / 'l.db')
    ledger.begin_run('r0', at=0)
    ledger.offered([('u', 0, None), ('v', 0, None)])
    for name, epochs in {'one': 1.0, 'two': 2.0}.items():
        ledger.submitted(name, at=0, total_epochs=epochs)
    ledger.commit()
    with Journal(tmp_path / 'l.db') as journal:
        found = efficiency(journal.history(), 50.0, MilpAllocator()).by_trainer
    ledger.close()
    assert found['one'] is None
    assert found['two'] is not None


def test_efficiency_is_unknown_where_the_pool_has_nothing_for_a_trainer(tmp_path: Path) -> None:
    ledger = Told(tmp_path / 'l.db')
    ledger.begin_run('r0', at=0)
    ledger.submitted('a', at=0)
    ledger.commit()
    with Journal(tmp_path / 'l.db') as journal:
        found = [efficiency(journal.history(), at, MilpAllocator()) for at in (0.0, 50.0)]
        assert found == [RunEfficiency({'a': None}, None)] * 2
        assert summary(journal.history())['trainers']['a']['samples_expected'] is None
    ledger.close()


def test_a_realistic_run_adds_up(tmp_path: Path) -> None:
    with Journal(demo_journal(tmp_path / 'l.db', runs=2, seconds=60.0)) as journal:
        found = summary(journal.history())
    node_s = found['node_s']
    parts = sum(v for k, v in node_s.items() if k != 'offered')
    assert parts == pytest.approx(node_s['offered'], abs=1e-6)
    assert all(v > 0 for v in node_s.values())
    assert found['blocks_killed'] > 0 and all(t['rescaled'] > 0 for t in found['trainers'].values())


def test_status_shows_budgets_over_restarts_and_minimum_shares(tmp_path: Path) -> None:
    path = tmp_path / 'ledger.journal'
    budgets = {'user anna': 400.0, 'total': 150.0}
    settings = ControllerSettings(budgets=budgets, min_shares={'user anna': 3})
    for run, begin in (('first', 1000.0), ('second', 2000.0)):
        ledger = Told(path)
        ledger.begin_run(run, at=begin, settings=DecisionSettings(settings, 'auto', 10.0).plain())
        ledger.submitted('a', at=begin, spec={'user': 'anna'})
        ledger.fragment_decided('a', 1, at=begin, nodes=['n0', 'n1'])
        if run == 'first':
            ledger.end_run(at=begin + 50, how='interrupted')
        ledger.close()
    with Journal(path) as journal:
        view = LiveView(journal)
        seen = view.snapshot(2030.0)
        most = ('user anna', 400.0, 160.0), ('total', 150.0, 160.0)
        share = LimitNow('minimum share', 'user anna', 3, 2)
        assert seen.limits == (*(LimitNow('budget', *each) for each in most), share)
        assert as_document(seen)['limits'][2]['whose'] == 'user anna'
        first = LiveView(journal, run='first').snapshot(2030.0)
        assert [limit.used for limit in first.limits] == pytest.approx([100.0, 100.0, 0])
        out = StringIO()
        Console(file=out, width=80).print(Screen(LiveView(journal).snapshot(2030.0)))
    for words in (
        'budget of user anna: 160 of 400 node-seconds\n',
        'budget of all trainers: 160 of 150 node-seconds, spent',
        'minimum share of user anna: 3 nodes, has 2',
    ):
        assert words in '\n'.join(line.rstrip() for line in out.getvalue().splitlines())

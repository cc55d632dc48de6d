"""``freetrain replay --ledger``: a run's own events, decided about once more."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain import Checkpoints, LocalSite, Reproducible, freetrain_app
from parsl_freetrain.cli.main import main
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.controller_state import Reply
from parsl_freetrain.core.controller.settings import ControllerSettings, DecisionSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.solver import allocator_named
from tests.support.training import fit, freetrain
from tests.support.waiting import wait_until

LONG = 240.0  # seconds; a bound for what takes a few
CURVE = ScalingCurve((1, 2, 4), (10.0, 15.0, 20.0))
SETTINGS = DecisionSettings(ControllerSettings(horizon_s=60.0), 'auto', 10.0)


def answer(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(['replay', '--ledger', str(path), '--json', *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(['replay', *options]) == 2
    said = capsys.readouterr()
    assert said.out == '' and said.err.startswith('freetrain: ') and said.err.count('\n') == 1
    return said.err


def recorded(path: Path, settings: DecisionSettings | None = SETTINGS) -> Path:
    """Trainer a runs on two nodes; two more join when a rescale would cost 2 s; then b comes."""
    journal = JournalWriter(path)
    journal.begin_run(ev.RunBegan(1000.0, 'by-hand', settings=settings.plain() if settings else {}))
    decides = settings or SETTINGS
    controller = Controller(allocator_named('auto', isolated=False), decides.controller)
    batches: tuple[tuple[ev.Event, ...], ...] = (
        (ev.TrainerSubmitted(1000.0, Trainer('a', 1, 4, 10**6, CURVE)),),
        (ev.NodesJoined(1001.0, 'x', ('x/1',)), ev.NodesJoined(1001.0, 'x', ('x/2',))),
        (ev.FragmentProgressed(1005.0, 'a', 1, 40, 15.0),),
        (ev.TrainerSubmitted(1006.0, Trainer('a', 1, 4)),),  # refused: there is one of its name
        (ev.NodesJoined(1010.0, 'y', ('y/1', 'y/2')),),
        (ev.FragmentEnded(1011.0, 'a', 1, 100, ev.Ending.STOPPED),),
        (ev.TrainerSubmitted(1020.0, Trainer('b', 1, 2, None, CURVE)),),
        (ev.Tick(1030.0),),
    )
    for batch in batches:
        try:
            reply = controller.handle_all(batch)
        except ValueError:
            reply = Reply()
        for event in batch:
            journal.take(event)
        at, decision = batch[0].at, reply.decision
        journal.take(
            ev.Decided(at, reply.actions)
            if decision is None
            else decision.event(at, reply.actions, keep_problem=True)
        )
    journal.take(ev.RunEnded(1040.0, 'shutdown'))
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return recorded(tmp_path / 'ledger.journal')


def test_same_settings_decide_the_same(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, ledger)
    assert found['decisions'] == found['same'] == found['reproduced'] >= 4
    assert found['differences'] == []
    assert found['gain_per_s']['run'] == found['gain_per_s']['replay'] > 0
    assert found['settings'] == {'solver': 'auto', 'horizon_s': 60.0, 'objective': 'throughput'}
    assert answer(capsys, ledger, '--horizon', '60', '--solver', 'auto') == found
    assert answer(capsys, ledger, '--solver', 'milp')['same'] == found['decisions']


def test_another_horizon_is_asked_in_the_state_that_the_run_was_in(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 5 s, two more nodes train 25 samples more; the rescale costs 30."""
    found = answer(capsys, ledger, '--horizon', '5')
    [grown] = [d for d in found['differences'] if d['trigger'] == 'NodesJoined']
    assert (grown['at_s'], grown['batch']) == (10.0, 5)
    assert grown['run']['allocation'] == {'a': 4} and grown['replay']['allocation'] == {'a': 2}
    assert grown['run']['gain_per_s'] == pytest.approx((60 * (20 - 15) - 2 * 15) / 60)
    assert grown['replay']['gain_per_s'] == 0
    assert found['reproduced'] == found['decisions'] > found['same']
    assert found['gain_per_s']['replay'] < found['gain_per_s']['run']


def by_objective(folder: Path, objective: str) -> str:
    path = folder / 'study.toml'
    path.write_text(f'objective = "{objective}"')
    return str(path)


def test_another_objective_and_another_solver(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = answer(capsys, ledger, '--solver', 'equal-share')
    assert shared['reproduced'] == shared['decisions']
    assert shared['gain_per_s']['replay'] <= shared['gain_per_s']['run']
    doubled = answer(capsys, ledger, by_objective(tmp_path, '2*rate'))
    assert doubled['same'] == doubled['decisions']
    assert doubled['gain_per_s']['replay'] == pytest.approx(2 * doubled['gain_per_s']['run'])


def test_a_human_reads_what_would_change(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['replay', '--ledger', str(ledger), '--horizon', '5']) == 0
    said = capsys.readouterr().out
    assert 'replayed with        solver auto, horizon 5 s, objective throughput' in said
    assert 'NodesJoined              a 4 -> 2' in said


def test_bad_input_gets_a_sentence(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ('--ledger', str(ledger))
    assert "There is no run 'other' in this ledger" in refusal(capsys, *given, '--run', 'other')
    assert "--solver is 'magic'" in refusal(capsys, *given, '--solver', 'magic')
    assert '--horizon is' in refusal(capsys, *given, '--horizon', '-1')
    assert "no metric 'loss'" in refusal(capsys, *given, by_objective(tmp_path, 'loss'))
    unknown = by_objective(tmp_path, 'rate/remaining_samples')
    assert "Trainer 'b'" in refusal(capsys, *given, unknown)
    assert '--idle does not go with --ledger' in refusal(capsys, *given, '--idle', 'x.csv')
    assert '--from does not go with --ledger' in refusal(capsys, *given, '--from', '1')
    assert 'Give --trainers with a trace' in refusal(capsys, '--nodes', '1')
    assert 'give --ledger, too' in refusal(capsys, '--nodes', '1', '--run', 'x')
    text = tmp_path / 'notes.txt'
    text.write_text('no database')
    assert 'is not a FreeTrain ledger' in refusal(capsys, '--ledger', str(text))
    assert 'There is no run with the ledger' in refusal(capsys, '--ledger', 'nowhere')
    (tmp_path / 'other').mkdir()
    for name, settings, sentence in (
        ('bare', None, "no settings of run 'by-hand'"),
        ('own', DecisionSettings(SETTINGS.controller, None, 1.0), 'an allocator of its own'),
    ):
        path = str(recorded(tmp_path / f'{name}.journal', settings))
        assert sentence in refusal(capsys, '--ledger', path)
    empty = JournalWriter(tmp_path / 'empty.journal')
    assert 'has no run yet' in refusal(capsys, '--ledger', str(empty.path))
    empty.begin_run(ev.RunBegan(1.0, 'r', settings=SETTINGS.plain()))
    empty.close()
    assert "has no events of run 'r'" in refusal(capsys, '--ledger', str(empty.path))


@pytest.mark.long
def test_decisions_of_a_run_are_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three trainers on three nodes, whose speed is measured, with rescales and a kill."""
    app = freetrain_app(
        max_nodes=2,
        total_epochs=100_000,
        mode=Reproducible(shards=2),
        checkpoints=Checkpoints(every_s=1.0),
    )(fit)
    short = freetrain_app(max_nodes=1, total_epochs=5, mode=Reproducible(shards=2))(fit)
    with freetrain(tmp_path, LocalSite(nodes=3, poll_s=0.2), stop_grace_s=1.0) as executor:
        path = ['--ledger', str(executor.ledger_path)]

        def trains(future: Any, fragments: int = 1) -> Callable[[], bool]:
            return lambda: (
                future.progress().fragments >= fragments and future.progress().samples > 0
            )

        first = app(pause_s=0.1, trainer_name='first')
        wait_until(trains(first), 'the first trainer does not train')
        second = app(pause_s=0.1, trainer_name='second')
        wait_until(trains(second), 'the second trainer does not train')
        third = short(pause_s=0.1, trainer_name='third')
        wait_until(trains(third), 'the third trainer does not train')
        # It may just be rescaled for the third, and have no fragment.
        wait_until(lambda: first.progress().nodes == 1, 'the first trainer is not rescaled')
        before = first.progress().fragments
        wait_until(lambda: main(['preempt', 'first', *path]) == 0, 'it cannot be preempted')
        wait_until(trains(first, before + 1), 'the first trainer does not train again')
        third.result(LONG)
        assert main(['cancel', 'second', *path]) == 0
        wait_until(second.done, 'the second trainer is not cancelled')
    journal = Journal(executor.ledger_path)
    [run] = journal.history().runs
    fragments = list(run.fragments.values())
    events = {type(event) for batch in journal.batches(run) for event in batch.events}
    assert {len(fragment.nodes) for fragment in fragments} == {1, 2}
    assert 'preempted' in {fragment.ending for fragment in fragments}
    assert {ev.NodesJoined, ev.FragmentProgressed, ev.FragmentEnded, ev.TrainerCancelled} <= events
    found = answer(capsys, executor.ledger_path)
    assert found['decisions'] > 5 and found['same'] == found['decisions'], found['differences']
    other = answer(capsys, executor.ledger_path, '--solver', 'equal-share', '--horizon', '1')
    assert other['reproduced'] == other['decisions'] == found['decisions']

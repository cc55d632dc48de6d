"""What ``freetrain plan`` says to expect of the holes of now."""

import json
from pathlib import Path

import pytest

from parsl_freetrain.cli.main import main
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.forecast import ENDLESS, PlannedBlock, forecasts, trainers_at
from parsl_freetrain.replay.trainers import ReplayTrainer
from tests.support.journals import demo_journal
from tests.support.told import Told

LINEAR = ScalingCurve((0, 4), (0.0, 40.0))
SETTINGS = ControllerSettings(min_hole_s=5.0)


def trainer(
    total: int, name: str = 'a', submit_s: float = 0.0, worth: ScalingCurve = LINEAR, least: int = 1
) -> ReplayTrainer:
    made = Trainer(name, least, 4, total, LINEAR, rescale_up_s=2.0, rescale_down_s=0.0)
    return ReplayTrainer(made, submit_s, worth)


def block(nodes: int, seconds: float, preemptible: bool = False) -> PlannedBlock:
    """A block that takes all of its hole."""
    return PlannedBlock(nodes, seconds, seconds, preemptible)


def test_one_block_for_one_trainer() -> None:
    # 4 nodes for 100 s at 40 samples/s; at worst they come 20 s later.
    [far] = forecasts([block(4, 100.0)], [trainer(10_000)], SETTINGS, 20.0, 1000.0)
    assert (far.left, far.finish_s) == (10_000, (None, None))
    assert far.samples == pytest.approx((3200, 4000))
    [near] = forecasts([block(4, 100.0)], [trainer(3600)], SETTINGS, 20.0, 1000.0)
    assert near.samples == pytest.approx((3200, 3600))
    assert near.finish_s[0] == pytest.approx(90) and near.finish_s[1] is None
    [sure] = forecasts([block(4, 100.0)], [trainer(800)], SETTINGS, 20.0, 1000.0)
    assert sure.samples == pytest.approx((800, 800)) and list(sure.finish_s) == pytest.approx(
        [20, 40]
    )


def test_what_counts_is_the_walltime_and_not_the_hole() -> None:
    # 60 of 100 s are asked for: 20 s late there is still time for all of them, 50 s late there is
    # not.
    for late_s, least in ((20.0, 2400), (50.0, 2000)):
        planned = [PlannedBlock(4, 60.0, 100.0)]
        [one] = forecasts(planned, [trainer(ENDLESS)], SETTINGS, late_s, 1000.0)
        assert one.samples == pytest.approx((least, 2400))
    # Nothing is planned: the block has its walltime whenever it starts.
    [free] = forecasts([PlannedBlock(4, 60.0)], [trainer(2400)], SETTINGS, 20.0, 10.0)
    assert free.samples == pytest.approx((2400, 2400)) and list(free.finish_s) == pytest.approx(
        [60, 80]
    )
    # One that can be preempted does not outlive its walltime either.
    planned = [PlannedBlock(4, 60.0, preemptible=True)]
    [may_go] = forecasts(planned, [trainer(ENDLESS)], SETTINGS, 20.0, 1000.0)
    assert may_go.samples == pytest.approx((0, 2400))
    # At worst it is preempted as soon as the scheduler may: 30 s after its start.
    safe = PlannedBlock(4, 60.0, preemptible=True, exempt_s=30.0)
    [exempt] = forecasts([safe], [trainer(ENDLESS)], SETTINGS, 20.0, 1000.0)
    assert exempt.samples == pytest.approx((1200, 2400))


def test_when_trainers_come_and_what_they_are_worth_is_as_their_file_says() -> None:
    [late] = forecasts([block(4, 100.0)], [trainer(ENDLESS, submit_s=30.0)], SETTINGS, 0.0, 50.0)
    assert late.samples == pytest.approx((2800, 2800))
    dear = ScalingCurve((0, 4), (0.0, 4000.0))
    two = [trainer(ENDLESS), trainer(ENDLESS, 'b', worth=dear)]
    one, other = forecasts([block(4, 100.0)], two, SETTINGS, 0.0, 50.0)
    assert one.samples == (0, 0) and other.samples == pytest.approx((4000, 4000))


def test_plan_tells_of_the_blocks_that_would_be_submitted(
    pbs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody wants the nodes, nothing preempts the block: it takes what its walltime says."""
    trainers = tmp_path / 'trainers.json'
    trainers.write_text(
        '[{"name": "cnn", "max_nodes": 4, "total_samples": 1000000, "nodes": [1, 4], '
        '"samples_per_s": [10, 40]}]'
    )
    for mode, samples in (('backfill', [36_000.0, 36_000.0]), ('preemptible', [0.0, 36_000.0])):
        site = tmp_path / 'site.toml'
        site.write_text(f'[pbspro]\nqueue = "batch"\nlongest_s = 900\nmode = "{mode}"\n')
        assert main(['plan', '--site', str(site), '--trainers', str(trainers), '--json']) == 0
        told = json.loads(capsys.readouterr().out)
        [only] = told['blocks']
        found = [only[what] for what in ('nodes', 'walltime_s', 'hole_s', 'preemptible')]
        assert found == [4, 900, None, mode == 'preemptible']
        assert only['cost'] == [0.0, pytest.approx(1.0)]  # 4 nodes, a quarter of an hour
        cnn = {'trainer': 'cnn', 'left': 1_000_000, 'samples': pytest.approx(samples)}
        assert told['trainers'] == [{**cnn, 'finish_s': [None, None]}]
        assert main(['plan', '--site', str(site)]) == 0
        said = capsys.readouterr().out
        assert 'it costs 0 to 1 charged node-hours' in said
        assert 'for 900 s' in said and ('until preempted' in said) == (mode == 'preemptible')
    assert not (pbs / 'called').exists()


def test_plan_goes_by_whether_the_site_lets_fragments_use_several_blocks(
    pbs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainers = tmp_path / 'trainers.json'
    trainers.write_text(
        '[{"name": "cnn", "min_nodes": 4, "max_nodes": 4, "total_samples": 1000000, '
        '"nodes": [4], "samples_per_s": [40]}]'
    )
    for spans, samples in (('true', 36_000.0), ('false', 0.0)):
        site = tmp_path / 'site.toml'
        site.write_text(
            f'[pbspro]\nqueue = "batch"\nlongest_s = 900\nmost_nodes = 2\nspans_blocks = {spans}\n'
        )
        assert main(['plan', '--site', str(site), '--trainers', str(trainers), '--json']) == 0
        told = json.loads(capsys.readouterr().out)
        assert told['trainers'][0]['samples'] == pytest.approx([samples] * 2)


def test_a_ledger_says_what_is_left_and_how_fast(tmp_path: Path) -> None:
    path = demo_journal(tmp_path / 'ledger.journal', nodes=2, seconds=20.0, ended=False)
    found = trainers_at(path)
    assert [t.trainer.name for t in found] == ['cnn', 'mlp']
    for one in (t.trainer for t in found):
        assert one.total_samples is not None and 0 < one.total_samples < 60_000
        assert one.curve is not None and one.curve.rate_at(1) == pytest.approx(280, rel=0.01)


def test_a_ledger_says_which_node_counts_a_trainer_may_have(tmp_path: Path) -> None:
    ledger = Told(tmp_path / 'ledger.journal')
    ledger.begin_run('r', at=1.0)
    ledger.submitted('t', at=1.0, spec={'min_nodes': 2, 'max_nodes': 4, 'sizes': (2, 4)})
    ledger.fragment_decided('t', 1, at=1.0, nodes=('x', 'y'))
    ledger.fragment_progress('t', 1, at=2.0, samples=20, rate=20.0)
    ledger.close()
    found = trainers_at(tmp_path / 'ledger.journal')
    assert list(found[0].trainer.counts()) == [2, 4]
    [one] = forecasts([block(3, 100.0)], found, SETTINGS, 0.0, 50.0)
    assert one.samples == pytest.approx((2000, 2000))  # on two of three nodes


def test_files_that_say_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / 'ledger.journal'
    ledger = Told(path)
    for words in ('has no run yet', 'anything left to train', "how fast 't' trains"):
        with pytest.raises(BadInput, match=words):
            trainers_at(path)
        if words == 'has no run yet':
            ledger.begin_run('r', at=1.0)
        else:
            ledger.submitted('t', at=1.0)
        ledger.commit()
    ledger.close()
    with pytest.raises(BadInput, match='cannot be read'):
        trainers_at(tmp_path / 'absent')
    for option, value in (('--start', '-1'), ('--look-ahead', 'inf')):
        assert main(['plan', '--site', 'local', option, value]) == 2
        assert f'{option} is {value}' in capsys.readouterr().err

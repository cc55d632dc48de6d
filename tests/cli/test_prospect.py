"""What ``freetrain plan`` says to expect of the holes of now."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsl_freetrain.cli.main import main
from parsl_freetrain.cli.prospect import ENDLESS, prospects, trainers_at
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.state import ControllerSettings
from parsl_freetrain.core.words import ScalingCurve, Trainer
from parsl_freetrain.ledger.store import Ledger
from tests.support.ledgers import demo_ledger

LINEAR = ScalingCurve((0, 4), (0.0, 40.0))
SETTINGS = ControllerSettings(min_hole_s=5.0)


def trainer(total: int, name: str = 'a') -> Trainer:
    return Trainer(name, 1, 4, total, LINEAR, rescale_up_s=2.0, rescale_down_s=0.0)


def test_one_block_for_one_trainer() -> None:
    # 4 nodes for 100 s at 40 samples/s; at worst they come 20 s later.
    [far] = prospects([(4, 100.0)], [trainer(10_000)], SETTINGS, 20.0, 1000.0)
    assert far.left == 10_000 and far.samples == pytest.approx((3200, 4000)) and far.finish_s == (None, None)
    [near] = prospects([(4, 100.0)], [trainer(3600)], SETTINGS, 20.0, 1000.0)
    assert near.samples == pytest.approx((3200, 3600)) and near.finish_s[0] == pytest.approx(90) and near.finish_s[1] is None
    [sure] = prospects([(4, 100.0)], [trainer(800)], SETTINGS, 20.0, 1000.0)
    assert sure.samples == pytest.approx((800, 800)) and list(sure.finish_s) == pytest.approx([20, 40])


def test_what_can_be_preempted_promises_nothing() -> None:
    [one] = prospects([(4, None)], [trainer(ENDLESS)], SETTINGS, 0.0, 50.0)
    assert one.left is None and one.samples == pytest.approx((0, 2000)) and one.finish_s == (None, None)


def test_no_block_too_short_a_block_and_too_few_nodes() -> None:
    for blocks in ([], [(4, 10.0)], [(0, 100.0)]):
        [one] = prospects(blocks, [trainer(100)], SETTINGS, 20.0, 50.0)
        assert one.samples[0] == 0 and one.finish_s[1] is None
    [wide] = prospects([(1, 100.0)], [Trainer('w', 2, 4, 100, LINEAR)], SETTINGS, 0.0, 50.0)
    assert wide.samples == (0, 0)


def test_trainers_share_what_there_is() -> None:
    both = prospects([(2, 100.0), (2, 100.0)], [trainer(100_000), trainer(100_000, 'b')], SETTINGS, 0.0, 50.0)
    assert sum(one.samples[1] for one in both) == pytest.approx(4000)


def test_a_ledger_says_what_is_left_and_how_fast(tmp_path: Path) -> None:
    path = demo_ledger(tmp_path / 'ledger.sqlite', nodes=2, seconds=20.0, ended=False)
    found = trainers_at(path)
    assert [t.name for t in found] == ['cnn', 'mlp']
    for one in found:
        assert one.total_samples is not None and 0 < one.total_samples < 60_000
        assert one.curve is not None and one.curve.rate_at(1) == pytest.approx(280, rel=0.01)


def test_files_that_say_too_little_get_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / 'ledger.sqlite'
    ledger = Ledger(path)
    for words in ('has no run yet', 'anything left to train', "how fast 't' trains"):
        with pytest.raises(BadInput, match=words):
            trainers_at(path)
        if words == 'has no run yet':
            ledger.begin_run('r', at=1.0, parsl_run_dir='', command='')
        else:
            ledger.trainer(name='t', at=1.0, spec={}, total_samples=None, samples=0)
        ledger.commit()
    ledger.close()
    with pytest.raises(BadInput, match='cannot be read'):
        trainers_at(tmp_path / 'absent')
    for option, value in (('--start', '-1'), ('--look-ahead', 'inf')):
        assert main(['plan', '--site', 'local', option, value]) == 2
        assert f'{option} is {value}' in capsys.readouterr().err

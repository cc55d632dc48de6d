"""The search in ``workflows/hpo.py``, with fewer settings than its users have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parsl_freetrain.ledger.reader import Reader
from site_configs import laptop
from workflows import hpo


def test_it_is_a_search_over_thirty_that_keeps_the_better_third() -> None:
    assert len(hpo.GRID) == 30 == hpo.ROUNDS[0][0] and len({hpo.name_of(s) for s in hpo.GRID}) == 30
    assert [kept for kept, _ in hpo.ROUNDS] == [30, 10, 3, 1] and [
        epochs for _, epochs in hpo.ROUNDS
    ] == [1, 3, 9, 27]


@pytest.mark.long
def test_a_smaller_search(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        hpo, 'GRID', [s for s in hpo.GRID if s['width'] == 64 and s['lr'] in (0.001, 0.1)]
    )
    monkeypatch.setattr(hpo, 'ROUNDS', ((4, 1), (2, 2), (1, 6)))
    assert hpo.main(laptop.config(nodes=2)) == 0
    found = re.findall(
        r'round (\d): (\d) settings.* best (\S+) with loss ([\d.]+)', capsys.readouterr().out
    )
    assert [(r, n) for r, n, *_ in found] == [('1', '4'), ('2', '2'), ('3', '1')]
    assert found[0][2].startswith('lr0.1')
    assert (
        float(found[2][3]) < float(found[1][3]) < float(found[0][3])
    )  # each round goes on where the one before stopped
    with Reader(run_dir / 'checkpoints' / 'ledger.sqlite') as reader:
        trainers = reader.history().trainers
    assert len(trainers) == 7 and {t.state for t in trainers} == {'finished'}

"""The picture of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from parsl_freetrain.ledger.picture import OKABE_ITO, TOL_MUTED, draw
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.store import Ledger
from tests.support.ledgers import demo_ledger

ROOT = str(Path(__file__).parents[2])


def colours_in(png: Path) -> set[tuple[int, ...]]:
    pixels = np.round(matplotlib.image.imread(png)[..., :3] * 255).astype(int).reshape(-1, 3)
    return {tuple(int(c) for c in row) for row in np.unique(pixels, axis=0)}


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(round(255 * c) for c in to_rgb(colour))


@pytest.mark.parametrize(('nodes', 'runs', 'trainers'), [(6, 2, 2), (60, 1, 14)])
def test_each_trainer_shows_in_a_colour(tmp_path: Path, nodes: int, runs: int, trainers: int) -> None:
    names = tuple(f'trainer ${i}_x$' for i in range(trainers))
    path = demo_ledger(tmp_path / 'l.db', nodes=nodes, runs=runs, trainers=names, seconds=40.0)
    with Reader(path) as reader:
        png = draw(reader, tmp_path / 'run.png', title='A run')
    expected = OKABE_ITO[:2] if trainers == 2 else TOL_MUTED
    assert {rgb(c) for c in expected} <= colours_in(png)


@pytest.mark.filterwarnings('error::UserWarning')
def test_a_ledger_in_which_nothing_happened_yet_can_be_drawn(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / 'l.db')
    with Reader(tmp_path / 'l.db') as reader:
        assert draw(reader, tmp_path / 'none.png').stat().st_size > 0
        ledger.begin_run('r0', at=1000, parsl_run_dir='', command='')
        ledger.trainer(name='a', at=1000, spec={}, total_samples=None, samples=0)
        ledger.commit()
        assert draw(reader, tmp_path / 'begun.png').stat().st_size > 0
    ledger.close()


def test_drawing_leaves_the_callers_pyplot_alone(tmp_path: Path) -> None:
    demo_ledger(tmp_path / 'l.db', seconds=10.0)
    code = (
        'import sys; from parsl_freetrain.ledger.picture import draw\n'
        'from parsl_freetrain.ledger.reader import Reader\n'
        'draw(Reader(sys.argv[1]), sys.argv[2]); assert "matplotlib.pyplot" not in sys.modules\n'
    )
    arguments = [sys.executable, '-c', code, str(tmp_path / 'l.db'), str(tmp_path / 'run.png')]
    subprocess.run(arguments, cwd=ROOT, timeout=120, check=True)

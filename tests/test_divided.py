"""The workloads that are divided in space, as their users run them with ``--small``."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parsl_freetrain import LocalSite
from workflows import cosmoflow, divided, unet3d

SITE = """
from parsl.config import Config

from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider


def config():
    provider = BackfillProvider(LocalSite(nodes=2, poll_s=0.25))
    return Config(executors=[FreeTrainExecutor(provider=provider)])
"""


def trained(workflow: ModuleType, out: Path, *options: str) -> dict[str, Any]:
    """What a small run found, after what holds for each of them."""
    assert workflow.main(['--small', '--out', str(out), *options]) == 0
    summary = json.loads((out / 'summary.json').read_text())
    told = summary[divided.DIVIDED]
    assert told['preempted'] >= 2 and told['rescaled'] >= 1
    assert {'data 1 x spatial 2x1x1 x pipeline 1', 'data 1 x spatial 1x1x1 x pipeline 1'} == set(
        told['shapes']
    )
    assert summary[divided.WHOLE]['preempted'] == 0
    assert all(told['samples'] == told['samples_expected'] for told in summary.values())
    assert (out / f'{workflow.__name__.rpartition(".")[2]}.png').read_bytes().startswith(b'\x89PNG')
    found: dict[str, Any] = json.loads((out / 'found.json').read_text())
    one, other = (dict(found['losses'][name]) for name in (divided.DIVIDED, divided.WHOLE))
    assert one.keys() == other.keys()
    early = sorted(one)[: len(one) // 4]
    # Rounding differs between shapes and grows with training: the beginning of the curves is equal,
    # and the outcome is as good.
    assert [one[samples] for samples in early] == pytest.approx(
        [other[samples] for samples in early], rel=0.005
    )
    assert one[max(one)] < 0.5 * one[min(one)]
    return found


@pytest.mark.long
def test_cosmoflow(tmp_path: Path) -> None:
    found = trained(cosmoflow, tmp_path / 'out')
    scores = np.array([found[name]['explained'] for name in (divided.DIVIDED, divided.WHOLE)])
    assert (scores > 0.5).all() and abs(scores[0] - scores[1]).max() < 0.1, scores


@pytest.mark.long
def test_unet3d(tmp_path: Path) -> None:
    """On a site from a file, into a folder that is not empty: what is in it is kept."""
    site, mine = tmp_path / 'here.py', tmp_path / 'out' / 'mine'
    site.write_text(SITE)
    mine.parent.mkdir()
    mine.write_text('kept')
    dice = trained(unet3d, tmp_path / 'out', '--site', str(site))['dice']
    assert (tmp_path / 'out' / 'previous-1' / 'mine').read_text() == 'kept'
    for tissue in ('grey', 'white'):
        assert min(scores[tissue] for scores in dice.values()) > 0.6, dice


def test_after_a_kill_the_progress_of_the_killed_fragment_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was, where the kill came late: the other trainer was submitted before any rescale."""
    asked: list[str] = []
    counts = iter((1, 1, 1, 2, 2))

    def ask(*_: object) -> str:
        asked.append('once')
        return 'It is being killed.'

    monkeypatch.setattr(divided, 'ask', ask)
    future: Any = SimpleNamespace(
        name='divided', done=lambda: False, progress=lambda: SimpleNamespace(fragments=next(counts))
    )
    divided.strike(future, tmp_path, LocalSite(nodes=1))
    assert asked == ['once']
    assert list(counts) == [2]


def test_a_site_that_is_not_there_is_one_sentence_before_anything_is_moved(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / 'mine').touch()
    assert cosmoflow.main(['--small', '--out', str(run_dir), '--site', 'nowhere']) == 2
    assert "There is no site 'nowhere'; name one of local, " in capsys.readouterr().err
    assert [path.name for path in run_dir.iterdir()] == ['mine']


def test_a_brain_that_is_not_installed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, 'nilearn', None)  # as Python marks what cannot be imported
    assert unet3d.main(['--small', '--out', str(tmp_path / 'out')]) == 2
    [sentence] = capsys.readouterr().err.strip().splitlines()
    assert re.search(r'nilearn, which is not installed: pip install nilearn', sentence)

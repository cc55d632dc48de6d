"""A training future in a notebook."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from parsl_freetrain.app import freetrain_app
from parsl_freetrain.executor.trainer.future import MOST_LOSSES, TrainingFuture
from parsl_freetrain.executor.trainer.notebook import HEIGHT, WIDTH, html_of
from parsl_freetrain.sites.local import LocalSite
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S


def test_it_shows_progress_and_the_last_metrics() -> None:
    html = html_of(
        'cnn',
        'running',
        500,
        2000,
        3,
        {'loss': 0.123456, 'acc': 0.5},
        [(0, 4.0), (250, 2.0), (500, 1.0)],
    )
    shown = ET.fromstring(html)
    assert (
        ''.join(shown.itertext())
        == 'cnn running on 3 nodes500 of 2,000 samples; loss 0.1235, acc 0.5'
    )
    bar, line = shown.find('progress'), shown.find('.//polyline')
    assert bar is not None and (bar.get('value'), bar.get('max')) == ('500', '2000')
    assert (
        line is not None
        and line.get('points')
        == f'0.0,0.0 {WIDTH / 2},{HEIGHT * 2 / 3:.1f} {WIDTH:.1f},{HEIGHT:.1f}'
    )


def test_what_is_not_known_is_not_shown_and_names_are_no_html() -> None:
    shown = ET.fromstring(html_of('<b>&', 'queued', 0, None, 0, {'<i>': 1.0}, [(0, 1.0)]))
    assert ''.join(shown.itertext()) == '<b>& queued0 samples; <i> 1'
    assert shown.find('progress') is None and shown.find('.//svg') is None
    ET.fromstring(
        html_of('a', 'running', 1, 1, 1, {}, [(5, 1.0), (5, 1.0)])
    )  # a flat line without a length


def test_of_many_losses_some_are_kept() -> None:
    future = TrainingFuture('a')
    for i in range(10 * MOST_LOSSES):
        future._progressed(i, {'loss': float(i)})
    future._progressed(0, {'loss': float('nan')})
    future._progressed(0, {'accuracy': 1.0})
    kept = [samples for samples, _ in future._losses]
    assert (
        MOST_LOSSES // 2 <= len(kept) <= MOST_LOSSES
        and kept == sorted(kept)
        and kept[-1] > 9 * MOST_LOSSES
    )


def test_a_training_from_a_notebooks_cells(tmp_path: Path) -> None:
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)):
        future = freetrain_app(max_nodes=1, total_epochs=8)(fit)(0.02)
        before = future._repr_html_()
        future.result()
        after = future._repr_html_()
    assert '0 samples' in before
    assert (
        'finished' in after
        and '768 of 768 samples' in after
        and 'loss' in after
        and '<svg' in after
    )


CELLS = (
    """
import parsl
import torch
from parsl.config import Config
from parsl_freetrain.app import freetrain_app
from parsl_freetrain.executor import FreeTrainExecutor
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider

provider = BackfillProvider(LocalSite(nodes=1, poll_s=0.2))
kernel = parsl.load(Config(executors=[FreeTrainExecutor(provider=provider)], strategy='none'))
""",
    """
class Network(torch.nn.Linear):
    pass

@freetrain_app(max_nodes=1, total_epochs=2)
def train(ctx, slope):
    model = Network(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(0, 1, 64)[:, None]
    for features, target in ctx.loop(torch.utils.data.TensorDataset(x, slope * x), batch_size=8):
        optimizer.zero_grad()
        loss = ((model(features) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())

future = train(3.0)
future
""",
    """
checkpoint = future.result()
future
""",
    """
kernel.cleanup()
parsl.clear()
checkpoint.samples
""",
)


@pytest.mark.long
def test_in_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ('IPYTHONDIR', 'JUPYTER_CONFIG_DIR', 'JUPYTER_DATA_DIR', 'JUPYTER_RUNTIME_DIR'):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    empty: dict[str, Any] = {
        'cell_type': 'code',
        'metadata': {},
        'execution_count': None,
        'outputs': [],
    }
    cells = [{**empty, 'id': f'cell{i}', 'source': source} for i, source in enumerate(CELLS)]
    document = json.dumps({'nbformat': 4, 'nbformat_minor': 5, 'metadata': {}, 'cells': cells})
    notebook = nbformat.reads(document, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(
        notebook, timeout=LIMIT_S, resources={'metadata': {'path': str(tmp_path)}}
    ).execute()
    shown = [
        [output['data'] for output in cell.outputs if 'data' in output] for cell in notebook.cells
    ]
    assert ' samples' in shown[1][-1]['text/html']
    assert '128 of 128 samples; loss' in ''.join(
        ET.fromstring(shown[2][-1]['text/html']).itertext()
    )
    assert shown[3][-1]['text/plain'] == '128'

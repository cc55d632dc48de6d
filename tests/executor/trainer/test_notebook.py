"""A training future in a notebook."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from parsl_freetrain.core.model.types import Progress
from parsl_freetrain.executor.trainer.future import TrainingFuture
from tests.support.waiting import LIMIT_S


def shown(html: str) -> dict[str, str]:
    head, row = ET.fromstring(html)
    return {th.text or '': td.text or '' for th, td in zip(head, row, strict=True)}


def test_what_is_known_is_shown_and_names_are_no_html() -> None:
    future = TrainingFuture('<b>&')
    future._progress = Progress(500, 20_000, 3, 4, 2, 1, {'loss': 0.123456})
    assert shown(future._repr_html_()) == {
        'trainer': '<b>&', 'state': 'waiting', 'nodes': '3', 'samples': '500/20k',
        'loss': '0.1235', 'frag': '4', 'pre': '2', 'resc': '1',
    }  # fmt: skip


CELLS = (
    """
import parsl
import torch
from parsl.config import Config
from parsl_freetrain.app import freetrain_app
from parsl_freetrain.executor.executor import FreeTrainExecutor
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
    empty: dict[str, Any] = {'cell_type': 'code', 'metadata': {}}
    empty |= {'execution_count': None, 'outputs': []}
    cells = [{**empty, 'id': f'cell{i}', 'source': source} for i, source in enumerate(CELLS)]
    document = json.dumps({'nbformat': 4, 'nbformat_minor': 5, 'metadata': {}, 'cells': cells})
    notebook = nbformat.reads(document, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(
        notebook, timeout=LIMIT_S, resources={'metadata': {'path': str(tmp_path)}}
    ).execute()
    told = [[o['data'] for o in cell.outputs if 'data' in o] for cell in notebook.cells]
    assert 'samples' in told[1][-1]['text/html']
    assert shown(told[2][-1]['text/html'])['samples'] == '128/128'
    assert told[3][-1]['text/plain'] == '128'

"""Rehearsals: a planted fault is found, and an honest training is the same in all forms."""

import copy
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parsl_freetrain import FragmentContext, Throughput, freetrain_app
from parsl_freetrain.cli.main import main
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.rehearsals import was_rehearsed
from tests.support.pages import blocks

X = torch.linspace(-1, 1, 4 * 40).reshape(40, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def test_the_fault_of_the_documentation_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parent.parent / 'docs' / 'your-script.md'
    (tmp_path / 'train.py').write_text(blocks(page, 'python')[0].code + '\ntrain()\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    assert main(['rehearse', 'train.py', '--steps', '6']) == 1
    shown = (
        page.read_text().partition('freetrain rehearse train.py --steps 6\n')[2].partition('```')[0]
    )
    timeless = re.compile(r', \d+ s$', re.M)
    assert timeless.sub('', capsys.readouterr().out) == timeless.sub('', shown)


def two_loops(ctx: FragmentContext, total: bool = False) -> None:
    """``total`` is only for the plain twin: it adds its losses up."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer = ctx.prepare(model, optimizer)
    for epochs in (2, None):
        for (x,) in ctx.loop(DataLoader(TensorDataset(X), 8), epochs=epochs):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, True)).square()
            loss.mean().backward()
            optimizer.step()
            ctx.state['turns'] = ctx.samples


def plain(batches: Any, total: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for (x,) in batches:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, True)).square()
        (loss.sum() if total else loss.mean()).backward()
        optimizer.step()
    return model


@pytest.mark.long
def test_an_honest_training_is_the_same_in_all_forms_and_as_plain_pytorch() -> None:
    app = freetrain_app(max_nodes=2, total_epochs=4, mode=Throughput())(two_loops)
    assert not was_rehearsed(two_loops)
    found = app.rehearse(steps=11, plain=plain)
    assert (found.same, found.steps, found.checkpoint.path) == (True, 11, ''), str(found)
    assert [row.form for row in found.rows if not row.why] == [
        'stopped in the first loop, and continued',
        "stopped at an epoch's end, and continued",
        'stopped after a loop, and continued',
        'killed, and continued',
        'on two ranks',
        'on three ranks, then on one',
        'with two DataLoader workers',
        'as plain PyTorch',
    ]
    assert was_rehearsed(two_loops)


def momentum(ctx: FragmentContext) -> None:
    """Reproducible mode refuses it; a cut loses the strength of its loss."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 1))
    average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.02)
    model, average, optimizer = ctx.prepare(model, average, optimizer)
    for (x,) in ctx.loop(TensorDataset(X), 8):
        with torch.no_grad():
            torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)
        strength = float(os.environ.get('STRENGTH', '1'))
        os.environ['STRENGTH'] = str(0.8 * strength)
        optimizer.zero_grad()
        (strength * (model(x) - x.sum(1, True)).square().mean()).backward()
        optimizer.step()


@pytest.mark.long
def test_what_reproducible_mode_refuses_is_rehearsed_in_its_own() -> None:
    app = freetrain_app(max_nodes=2, total_epochs=2, mode=Throughput())(momentum)
    first, *_, last = app.rehearse(steps=4).rows
    assert (first.step, first.why.partition(' step is')[0]) == (3, 'the loss of the next')
    assert (last.form, last.ran) == ('on two and three ranks', False)


@pytest.mark.long
def test_another_loss_than_that_of_plain_pytorch_is_found() -> None:
    app = freetrain_app(max_nodes=2, total_epochs=4)(two_loops)
    (*_, last) = app.rehearse(total=True, steps=4, plain=plain).rows
    assert 'a loss that is no mean over samples' in last.why


def test_a_main_gets_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'with_main.py').write_text('def main(config): print(config.executors[0].label)\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    assert main(['rehearse', 'with_main.py']) == 2
    said = capsys.readouterr()
    assert said.out == 'threads\n' and 'has called no training' in said.err


def test_what_cannot_train_is_refused() -> None:
    def fails(ctx: FragmentContext) -> None:
        raise ValueError('no data')

    with pytest.raises(BadInput, match='did not train undisturbed: ValueError: no data'):
        freetrain_app(total_epochs=1)(fails).rehearse()
    with pytest.raises(
        BadInput, match='number of steps of a rehearsal is 1; it must be at least 4'
    ):
        freetrain_app(total_epochs=1)(fails).rehearse(steps=1)

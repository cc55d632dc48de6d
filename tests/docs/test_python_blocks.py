"""Every Python block of the documentation runs: a page's in order, in one namespace; those that
speak to ``ctx`` in a fragment. Functions are called, too, but for NOT_CALLED.
"""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import LocalSite, Shape, Throughput, freetrain_app
from tests.cli.test_run import freetrain_run
from tests.support.pages import ROOT, Block, blocks, name_of, pages
from tests.support.prepared import prepare
from tests.support.training import freetrain

WITH_PYTHON = [page for page in pages() if blocks(page, 'python')]
CALLED = {'README.md', 'replay.md', 'parallel.md', 'chimera.md', 'guides/first-site.md'}
NOT_CALLED = {
    'app.md': 'shapes of several ranks: tests/training/loop/test_shapes.py',
    'diloco.md': 'replicas on several nodes: tests/executor/test_replicas.py',
    'command-line.md': 'a workflow without a training in it; tests/cli/test_run.py runs whole ones',
    'tuning.md': 'a search of many trainers: tests/tuning/test_tune.py',
    'sharding.md': 'shapes of several ranks: tests/training/parallel/test_sharded.py',
    'your-script.md': 'it has a fault; tests/test_rehearsal.py rehearses it',
    'get-started.md': 'the file site_configs/laptop.py: tests/sites/test_named.py',
    'tutorial.md': 'run as it says by the test of its script',
    'packages.md': 'commands of packages: tests/packages/test_trainers.py',
    'globus.md': 'main() needs an endpoint in the cloud of Globus Compute',
}
# Pages with a script for freetrain run.
SCRIPTS = ('README.md', 'tutorial.md')
# Pages whose blocks need a training that runs, in this order: a later one finds what an earlier one
# has trained.
TRAINING = ('app.md', 'checkpoints.md', 'parallel.md', 'chimera.md')


def trained(page: str, names: dict[str, Any]) -> None:
    """What a page's functions give when they are called."""
    if page == 'replay.md':
        assert 0.5 < names['efficiency']('idle.csv', 'trainers.json', 120.0) < 1.2


def train_with(page: str, names: dict[str, Any], folder: Path) -> None:
    """Train an epoch with the function that a page defines, where it says how to train."""
    if page == 'parallel.md':
        np.save(folder / 'volumes.npy', np.ones((16, 1, 4, 4, 4), dtype=np.float32))
        given: tuple[Any, ...] = (str(folder / 'volumes.npy'),)
    elif page == 'chimera.md':
        given = (
            [functools.partial(nn.Linear, 4, 4)] * 2,
            TensorDataset(torch.ones(16, 4), torch.ones(16, 4)),
        )
    else:
        return
    app = freetrain_app(sizes={1: Shape()}, total_epochs=1, mode=Throughput())
    trained = app(names['train'].function)(*given, trainer_name=page.removesuffix('.md'))
    assert trained.result().samples == 16


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block in a namespace; its line numbers are those of the page."""
    exec(compile('\n' * (block.line - 1) + block.code, block.page, 'exec'), names)


def run_in_a_fragment(block: Block) -> None:
    """Run a block that speaks to ``ctx`` in a fragment, which then trains an epoch."""

    def fragment(ctx, code):  # type: ignore[no-untyped-def]
        import torch

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {'ctx': ctx, 'model': model, 'optimizer': optimizer}
        exec(code, names)
        for x, y in ctx.loop(
            torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1)), batch_size=8
        ):
            names['optimizer'].zero_grad()
            ((names['model'](x) - y) ** 2).mean().backward()
            names['optimizer'].step()
            if 'scheduler' in names:
                names['scheduler'].step()

    name = f'{block.page.removesuffix(".md").replace("/", "-")}-{block.line}'
    checkpoint = freetrain_app(max_nodes=1, total_epochs=1)(fragment)(
        block.code, trainer_name=name
    ).result()
    assert checkpoint.samples == 16


def speaks_to_ctx(block: Block) -> bool:
    """Whether ``ctx`` is used outside of any function."""
    tree = ast.parse(block.code)
    outer = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    inner = {id(node) for function in outer for node in ast.walk(function)}
    return any(
        isinstance(node, ast.Name) and node.id == 'ctx' and id(node) not in inner
        for node in ast.walk(tree)
    )


def digits() -> dict[str, Any]:
    """What the pages call ``train``, ``images``, ``labels`` and ``model``."""

    def train(ctx, images, labels):  # type: ignore[no-untyped-def]
        import torch

        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for x, y in ctx.loop(torch.utils.data.TensorDataset(images, labels), batch_size=32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss.item())

    return {
        'train': freetrain_app(max_nodes=1, total_epochs=1)(train),
        'images': torch.rand(64, 8, 8),
        'labels': torch.arange(64) % 10,
        'model': nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    }


def does_something(function: ast.FunctionDef) -> bool:
    """Whether there is more in a function than ``...``."""
    return any(
        not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in function.body
    )


def test_functions_are_called_or_listed() -> None:
    defining = {
        block.page
        for page in WITH_PYTHON
        for block in blocks(page, 'python')
        for line in ast.parse(block.code).body
        if isinstance(line, ast.FunctionDef) and does_something(line)
    }
    assert defining == CALLED | NOT_CALLED.keys()


@pytest.fixture
def folder(run_dir: Path) -> Path:
    """The current folder, with the files that pages name."""
    prepare(run_dir)
    return run_dir


@pytest.mark.parametrize(
    'page',
    [page for page in WITH_PYTHON if name_of(page) not in (*TRAINING, *SCRIPTS)],
    ids=name_of,
)
def test_blocks_of_a_page_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {'__name__': '__main__'}
    for block in blocks(page, 'python'):
        run(block, names)
    trained(name_of(page), names)


@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_script_of_the_readme_runs_as_it_says(folder: Path) -> None:
    (script,) = blocks(ROOT / 'README.md', 'python')
    (folder / 'train.py').write_text(script.code)
    done = freetrain_run(folder, 'train.py')
    assert done.returncode == 0 and 'samples=5000' in done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_tutorial_does_what_it_says(folder: Path) -> None:
    script, weights, site, curves = blocks(ROOT / 'docs' / 'tutorial.md', 'python')
    (folder / 'forces.py').write_text(script.code)
    (folder / 'site.py').write_text(site.code)
    done = freetrain_run(folder, 'forces.py', '--site', 'site.py', '--', '--seeds', '2')
    assert done.returncode == 0 and 'they differ by' in done.stdout, done.stderr
    assert re.search(r'\d+ \(\d+ verified\) 15,360/15,360', done.stdout)
    for block in (weights, curves):
        run(block, {'__name__': '__main__'})
    assert (folder / 'forces.png').is_file() and (folder / 'forces.safetensors').is_file()


def test_blocks_that_need_a_training_run(folder: Path) -> None:
    by_name = {name_of(page): page for page in WITH_PYTHON}
    with freetrain(folder, LocalSite(nodes=1, poll_s=0.2)):
        given = digits()
        for page in TRAINING:
            names = {'__name__': '__main__', **given}
            for block in blocks(by_name[page], 'python'):
                if speaks_to_ctx(block):
                    run_in_a_fragment(block)
                else:
                    run(block, names)
            train_with(page, names, folder)
            if page == 'app.md':
                assert names['checkpoint'].samples == 64
                given['future'] = names['future']  # what checkpoints.md exports
    assert (folder / 'model.safetensors').is_file()

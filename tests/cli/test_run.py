"""``freetrain run``, with workflows that train, fail and are none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parsl_freetrain.cli.main import main
from tests.support.programs import FREETRAIN, Program, run_to_end
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.usefixtures('nodes_share_a_template')
ROOT = Path(__file__).resolve().parent.parent.parent

SITE = """
from parsl.config import Config
from parsl_freetrain import BackfillProvider, FreeTrainExecutor, LocalSite, Timeouts
def config():
    site = LocalSite(nodes=1, poll_s=0.2)
    executor = FreeTrainExecutor(
        provider=BackfillProvider(site=site),
        checkpoint_dir='kept',
        timeouts=Timeouts(stop_grace_s=2.0),
    )
    return Config(executors=[executor], strategy='none')
"""

TRAINER = """
import sys, parsl, torch
from parsl_freetrain import freetrain_app
@freetrain_app(total_epochs=EPOCHS)
def train(ctx, scale):
    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(torch.utils.data.TensorDataset(torch.ones(32, 1)), batch_size=8):
        optimizer.zero_grad()
        (model(x) - scale).square().mean().backward()
        optimizer.step()
"""
TRAINS = f"""{TRAINER}
def main(config, arguments=()):
    with parsl.load(config):
        print('trained', train(3.0).result().samples, *arguments)
"""
SCRIPT = f"""from neighbour import total{TRAINER.replace('EPOCHS', 'total')}
if __name__ == '__main__':
    print('trained', train(3.0).result().samples, *sys.argv[1:])
"""


def freetrain_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, '-m', 'parsl_freetrain.cli.main', 'run', *arguments]
    return run_to_end(program, cwd=folder, more_env={'PYTHONPATH': str(ROOT)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / 'site.py').write_text(SITE)
    return tmp_path


def test_a_workflow_runs_on_the_site_that_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / 'mine.py').write_text(TRAINS.replace('EPOCHS', '2'))
    assert main(['run', 'mine.py', '--site', 'site.py', '--json', '--', 'a', '--b']) == 0
    said = capsys.readouterr()
    assert 'trained 64 a --b' in said.err
    assert f'freetrain watch --ledger {folder}/kept/ledger.journal' in said.err
    found = json.loads(said.out)
    trained = found['trainers']['train']
    assert trained['samples'] == 64 and trained['state'] == 'finished'


def test_a_script_needs_no_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / 'neighbour.py').write_text('total = 2')
    (folder / 'mine.py').write_text(SCRIPT)
    done = freetrain_run(folder, 'mine.py', '--site', 'site.py', '--', 'a', '--b')
    assert done.returncode == 0 and 'trained 64 a --b' in done.stdout, done.stderr
    (folder / 'loads.py').write_text(
        'import parsl\nfrom parsl_freetrain import FreeTrainExecutor\n'
        "parsl.load(parsl.Config(executors=[FreeTrainExecutor(site='laptop')]))"
    )
    monkeypatch.chdir(folder)
    assert main(['run', 'loads.py', '--site', 'site.py']) == 2
    assert 'run it with python, or leave parsl.load out' in capsys.readouterr().err
    (folder / 'leaves.py').write_text('raise SystemExit(3)')
    assert main(['run', 'leaves.py', '--site', 'site.py']) == 3


BESIDE = """
from parsl.executors import HighThroughputExecutor
alone = config
def config():
    ordinary = HighThroughputExecutor('ordinary', max_workers_per_node=1, address='127.0.0.1')
    return Config(executors=[*alone().executors, ordinary], strategy='none')
"""
APPS = """
import parsl
from neighbour import twice
@parsl.python_app(executors=['ordinary'])
def own(x):
    import neighbour
    return neighbour.total * x
print('apps', parsl.python_app(twice, executors=['ordinary'])(3).result(), own(3).result())
"""


@pytest.mark.long
def test_apps_on_an_executor_beside_find_the_modules_of_the_files_folder(folder: Path) -> None:
    (folder / 'site.py').write_text(SITE + BESIDE)
    (folder / 'sub').mkdir()
    (folder / 'sub' / 'neighbour.py').write_text('total = 3\ndef twice(x):\n    return 2 * x')
    (folder / 'sub' / 'mine.py').write_text(APPS)
    done = freetrain_run(folder, 'sub/mine.py', '--site', 'site.py')
    assert 'apps 6 9' in done.stdout, done.stderr


@pytest.mark.parametrize('times', [1, pytest.param(3, marks=pytest.mark.long)])
def test_ctrl_c_stops_it_and_says_that_nothing_is_lost(folder: Path, times: int) -> None:
    workflow = folder / 'mine.py'
    workflow.write_text(TRAINS.replace('EPOCHS', '1_000_000'))
    command = [*FREETRAIN, 'run', 'mine.py', '--site', 'site.py']
    with Program(command, cwd=folder, stderr=subprocess.PIPE, process_group=0) as running:
        end = time.monotonic() + LIMIT_S
        while not list((folder / 'kept').glob('train/logs/*')):
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        for _ in range(times - 1):
            time.sleep(0.3)
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=LIMIT_S)
    # A shell takes an end by SIGINT for status 130, too.
    assert running.returncode in ((130,) if times == 1 else (130, -signal.SIGINT)), err
    assert 'Nothing is lost: the same command goes on' in err and 'Traceback' not in err
    assert times > 1 or 'node-seconds' in out


def test_the_users_own_error_comes_with_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / 'broken_workflow.py').write_text('def main(config):\n    return 1 / 0\n')
    assert main(['run', 'broken_workflow.py', '--site', 'site.py', '--json']) == 1
    said = capsys.readouterr()
    assert said.out == ''  # a workflow that has begun no run has none to tell of
    err = said.err
    assert 'return 1 / 0' in err and 'should not have happened' not in err
    assert 'broken_workflow.py ended with ZeroDivisionError' in err
    (folder / 'refusing_workflow.py').write_text('def main(config):\n    return 3\n')
    assert main(['run', 'refusing_workflow.py', '--site', 'site.py']) == 1


@pytest.mark.parametrize(
    ('text', 'arguments', 'words'),
    [
        (None, ['absent.py'], 'There is no workflow absent.py'),
        (None, ['no_such_module'], 'There is no workflow no_such_module'),
        (None, ['json'], 'json/__init__.py, to run it as a script'),
        ('def main(): pass', ['w1.py'], 'does not take a Parsl configuration'),
        ('def main(arguments=None): pass', ['w2.py'], 'run the workflow with python'),
        (
            'def main(config): pass',
            ['w3.py', '--', 'more'],
            "takes no arguments of its own, and 'more' was given",
        ),
        (
            'import no_such_thing\ndef main(config): pass',
            ['w4.py'],
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        ('def main(config): pass', ['w5.py', '--site', 'nowhere'], "There is no site 'nowhere'"),
    ],
)
def test_bad_input_is_a_sentence(
    text: str | None,
    arguments: list[str],
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    if text is not None:
        (folder / arguments[0]).write_text(text)
    assert main(['run', *arguments]) == 2
    out = capsys.readouterr()
    assert out.out == '' and len(out.err.splitlines()) == 1 and words in out.err
    assert not (folder / 'checkpoints').exists()

"""The guides, from first to last command: a first site on a real Slurm, a rehearsed preemption."""

import sys
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, LocalSite, TrainingFuture, freetrain_app
from parsl_freetrain.cli.main import main
from parsl_freetrain.journal.read import Journal
from tests.support.pages import ROOT, as_shown, blocks, commands
from tests.support.programs import run_to_end
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import wait_until

GUIDE = ROOT / 'docs' / 'guides' / 'first-site.md'
# The cluster of the tests is one computer, and starts a job within some two seconds.
HERE = 'interface = "lo"\npoll_s = 0.5\nsubmit_every_s = 0\nstart_s = 3\n'


def perform(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says: ``freetrain run`` in a process of its own, the others in this one."""
    if words[1] == 'run':
        words = [sys.executable, '-m', 'parsl_freetrain.cli.main', *words[1:]]
        done = run_to_end(words, cwd=folder, more_env={'PYTHONPATH': str(ROOT)})
        assert done.returncode == 0, f'{words}\n{done.stdout}{done.stderr}'
        return done.stdout
    capsys.readouterr()
    status, said = main(words[1:]), capsys.readouterr()
    assert status == 0, f'{words}\n{said.out}{said.err}'
    return said.out


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.usefixtures('nodes_share_a_template')
def test_to_a_first_site(
    slurm: Cluster,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv('COLUMNS', '100')
    [site], [workflow] = blocks(GUIDE, 'toml'), blocks(GUIDE, 'python')
    (run_dir / 'my_site.toml').write_text(site.code + HERE)
    (run_dir / 'workflow.py').write_text(workflow.code)
    said: dict[str, str] = {}
    for command in commands(GUIDE):
        assert command.words[0] == 'freetrain'
        said[command.words[1]] = perform(command.words, run_dir, capsys)
    verbs = {'holes', 'plan', 'doctor', 'run', 'status', 'watch', 'why', 'logs', 'report'}
    assert said.keys() == verbs
    assert '#SBATCH --partition=batch' in said['plan']
    assert 'first' in said['status'] and 'finished' in said['status']
    assert 'samples=5000' in said['run']  # five epochs of a thousand samples
    assert (run_dir / 'freetrain-report.html').is_file() and (
        run_dir / 'freetrain-doctor.json'
    ).is_file()


def trains(future: TrainingFuture, fragment: int) -> None:
    """Wait until this fragment trains."""
    before = future.progress().samples
    wait_until(
        lambda: future.progress().fragments >= fragment and future.progress().samples > before
    )


def test_to_rehearsing_a_preemption(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = freetrain_app(max_nodes=1, total_epochs=10**5, checkpoints=Checkpoints(every_s=0.5))(fit)
    with freetrain(run_dir, LocalSite(nodes=1, poll_s=0.2), stop_grace_s=2.0) as executor:
        future = app(pause_s=0.01, trainer_name='digits')
        fragment = 1
        for command in commands(ROOT / 'docs' / 'guides' / 'preemption.md'):
            trains(future, fragment)
            capsys.readouterr()
            assert command.words[0] == 'freetrain'
            assert main(command.words[1:]) == 0, str(command)
            if command.shown:
                assert as_shown(command.shown, capsys.readouterr().out, loosely=False), str(command)
            fragment += command.words[1] == 'preempt'
        trains(future, fragment)
        assert fragment == 3
        assert future.progress().preempted == 1
    first, second, third = Journal(executor.ledger_path).history().fragments[:3]
    with_notice, killed = sorted((first, second), key=lambda one: one.ending != 'stopped')
    assert with_notice.samples == with_notice.reached, 'it had time to save'
    assert (killed.ending, killed.error) == ('preempted', 'a rehearsed preemption')
    assert third.launched.samples == second.samples

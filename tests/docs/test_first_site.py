"""The guide to a first site, from its first command to its last, on a real Slurm cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parsl_freetrain.cli.main import main
from tests.support.pages import ROOT, blocks, commands
from tests.support.programs import run_to_end
from tests.support.slurm import Cluster

pytestmark = pytest.mark.slurm

GUIDE = ROOT / 'docs' / 'guides' / 'first-site.md'
# The cluster of the tests is one computer, and starts a job within some two seconds.
HERE = 'interface = "lo"\npoll_s = 0.5\nsubmit_every_s = 0\nstart_s = 3\n'


def perform(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says: ``freetrain run`` in a process of its own, the others in this one."""
    if words[1] == 'run':
        done = run_to_end(
            [sys.executable, '-m', 'parsl_freetrain.cli.main', *words[1:]],
            cwd=folder,
            more_env={'PYTHONPATH': str(ROOT)},
        )
        assert done.returncode == 0, f'{words}\n{done.stdout}{done.stderr}'
        return done.stdout
    capsys.readouterr()
    status, said = main(words[1:]), capsys.readouterr()
    assert status == 0, f'{words}\n{said.out}{said.err}'
    return said.out


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_guide_from_its_first_command_to_its_last(
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
    assert said.keys() == {
        'holes',
        'plan',
        'doctor',
        'run',
        'status',
        'watch',
        'why',
        'logs',
        'report',
    }
    assert '#SBATCH --partition=batch' in said['plan']
    assert 'first' in said['status'] and 'finished' in said['status']
    assert 'samples=5000' in said['run']  # five epochs of a thousand samples
    assert (run_dir / 'freetrain-report.html').is_file() and (
        run_dir / 'freetrain-doctor.json'
    ).is_file()

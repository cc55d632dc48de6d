"""``freetrain new``: what it writes runs, here and on real schedulers."""

from pathlib import Path

import pytest

from parsl_freetrain.cli.main import main
from parsl_freetrain.cli.sites import provider_of
from parsl_freetrain.sites.pbspro import PbsSite
from parsl_freetrain.sites.slurm import SlurmSite
from tests.cli.test_run import freetrain_run
from tests.support.openpbs import PbsCluster
from tests.support.slurm import Cluster


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_script_trains_on_this_computer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv('PATH', '/nonexistent')  # no scheduler
    monkeypatch.chdir(tmp_path)
    assert main(['new', 'first']) == 0
    said = capsys.readouterr().out
    assert 'no Slurm or PBS here' in said and 'freetrain run first/train.py\n' in said
    assert [path.name for path in Path('first').iterdir()] == ['train.py']
    done = freetrain_run(tmp_path, 'first/train.py')
    assert done.returncode == 0 and 'samples=20000' in done.stdout, done.stderr
    assert Path('checkpoints/example').is_dir()  # not that of another first script
    assert main(['new', 'first']) == 2
    assert 'first/train.py exists already; name another folder' in capsys.readouterr().err


@pytest.mark.slurm
def test_slurm_is_asked_for_its_partitions(
    slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['new', str(tmp_path)]) == 0
    assert f'--site {tmp_path}/site.toml' in capsys.readouterr().out
    site = provider_of(str(tmp_path / 'site.toml')).site
    assert isinstance(site, SlurmSite) and site.options.partition == 'batch'
    assert '# debug: ' in (tmp_path / 'site.toml').read_text()


@pytest.mark.pbs
def test_pbs_is_asked_for_its_queues(openpbs: PbsCluster, tmp_path: Path) -> None:
    assert main(['new', str(tmp_path)]) == 0
    site = provider_of(str(tmp_path / 'site.toml')).site
    assert isinstance(site, PbsSite) and site.options.queue == 'workq'

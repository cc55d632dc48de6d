"""Sites by name, and what their files refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.cli.main import main
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.sites.batch.limits import QueueLimits
from parsl_freetrain.sites.cobalt import CobaltSite
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.named import site_described, site_in_table
from parsl_freetrain.sites.pbspro import PbsSite
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.slurm import SlurmSite


def site_of(**settings: Any) -> Any:
    provider = FreeTrainExecutor(**settings).provider
    assert isinstance(provider, BackfillProvider)
    return provider.site


def test_an_executor_for_a_site_by_its_name() -> None:
    site = site_of(site='polaris', account='my-project')
    assert isinstance(site, PbsSite)
    found = site.options
    assert (found.queue, found.account, found.mode) == ('preemptable', 'my-project', 'preemptible')
    assert found.most_nodes == 10
    site = site_of(site='theta', account='my-project', queue='debug-flat-quad')
    assert isinstance(site, CobaltSite) and site.options.mcdram == 'flat'
    site = site_of(site='laptop')
    assert isinstance(site, LocalSite) and site.nodes == 2


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({}, r'no site .*aurora, crux, delta, frontier, laptop, perlmutter, polaris, theta'),
        ({'site': 'nosuch'}, r"no site 'nosuch'.*aurora, crux, delta, frontier, laptop, perlmut"),
        ({'site': 'polaris'}, 'Polaris takes no job without an account; .*FREETRAIN_ACCOUNT'),
        (
            {'site': 'polaris', 'account': 'a', 'queue': 'demand'},
            r"Polaris has no queue 'demand' for blocks; it has preemptable, prod",
        ),
        ({'site': 'theta'}, 'Theta takes no job without an account'),
    ],
)
def test_what_a_site_needs(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], sentence: str
) -> None:
    monkeypatch.delenv('FREETRAIN_ACCOUNT', raising=False)
    with pytest.raises(BadInput, match=sentence):
        FreeTrainExecutor(**settings)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match='is no queue'):
        QueueLimits(nodes=(4, 2), walltime_s=(1, 2), jobs=1)


def test_a_file_of_the_users_own_comes_first(run_dir: Path) -> None:
    (run_dir / 'site_configs').mkdir()
    (run_dir / 'site_configs' / 'polaris.py').write_text(
        'def site(account=None):\n    raise ZeroDivisionError("mine")\n'
    )
    with pytest.raises(BadInput, match='ZeroDivisionError: mine'):
        FreeTrainExecutor(site='polaris')


def test_tables(tmp_path: Path) -> None:
    file = tmp_path / 'site.toml'
    for text, kind in (
        ('[pbspro]\nqueue = "prod"\n', PbsSite),
        ('[cobalt]\nqueue = "default"\n', CobaltSite),
        ('[slurm]\npartition = "batch"\n', SlurmSite),
        ('partition = "batch"\n', SlurmSite),
    ):
        file.write_text(text)
        assert type(site_described(str(file))) is kind
    with pytest.raises(BadInput, match=r'site\.toml has all settings: write account there'):
        site_described({'name': str(file), 'account': 'physics'})
    file.write_text('[pbspro]\nqueu = "prod"\n')
    with pytest.raises(BadInput, match=r'site\.toml: queue is missing; there is no queu'):
        site_in_table(file)
    file.write_text('[lfs]\nqueue = "normal"\n')
    with pytest.raises(BadInput, match=r'has the table lfs; .* one of slurm, pbspro, cobalt'):
        site_in_table(file)


def test_plan_by_name_shows_everything_and_sends_nothing(
    pbs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three nodes have the four GPUs and the system that blocks ask for."""
    monkeypatch.setenv('FREETRAIN_ACCOUNT', 'my-project')
    assert main(['holes', '--site', 'polaris', '--json']) == 0
    assert [hole['nodes'] for hole in json.loads(capsys.readouterr().out)] == [3]
    assert main(['plan', '--site', 'polaris']) == 0
    script = capsys.readouterr().out
    assert '#PBS -A my-project\n' in script
    assert '#PBS -l select=3:system=polaris:ngpus=4\n' in script
    assert not (pbs / 'called').exists()

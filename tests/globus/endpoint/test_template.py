"""The template for Polaris: rendered by Globus Compute's own program, loaded by its own loader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click import ClickException
from globus_compute_endpoint.endpoint.config.utils import load_config_yaml

from parsl_freetrain.cli.main import main
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.globus.engine import FreeTrainEngine
from parsl_freetrain.executor.globus.registration import register
from parsl_freetrain.sites.pbspro import PbsSite
from tests.support.programs import run_to_end

TEMPLATE = Path(__file__).resolve().parents[3] / 'site_configs' / 'globus'
RIGHT = {'account': 'climate', 'checkpoint_dir': '/eagle/climate/checkpoints'}


def render(
    folder: Path, options: dict[str, Any], template: Path = TEMPLATE
) -> subprocess.CompletedProcess[str]:
    (folder / 'options.json').write_text(json.dumps(options))
    return run_to_end(
        [
            Path(sys.executable).with_name('globus-compute-endpoint'),
            'render-user-config',
            '-t',
            template / 'user_config_template.yaml.j2',
            '-s',
            template / 'user_config_schema.json',
            '-o',
            folder / 'options.json',
        ]
    )


@pytest.mark.parametrize(
    'options',
    [
        RIGHT,
        {
            **RIGHT,
            'queue': 'debug',
            'filesystems': ['home', 'flare'],
            'longest_s': 3600,
            'max_blocks': 1,
            'retries': 2,
            'metric': 'speedup',
            'worker_init': 'module load conda\nconda activate "my env"; echo {{ account }}',
        },
    ],
    ids=['least', 'all'],
)
def test_what_it_renders_is_an_engine(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = render(tmp_path, options)
    assert done.returncode == 0, done.stderr
    register()
    monkeypatch.chdir(tmp_path)  # an endpoint is started anywhere
    engine = load_config_yaml(done.stdout).engine
    assert isinstance(engine, FreeTrainEngine)
    provider = engine.executor.provider
    assert isinstance(provider.site, PbsSite)
    assert engine.executor.checkpoint_dir == '/eagle/climate/checkpoints'
    assert provider.max_blocks == options.get('max_blocks', 4)
    options_of_site = provider.site.options
    assert (options_of_site.account, options_of_site.queue) == (
        'climate',
        options.get('queue', 'preemptable'),
    )
    assert list(options_of_site.filesystems) == options.get('filesystems', ['home', 'eagle'])
    if 'worker_init' in options:
        assert options_of_site.worker_init.startswith(options['worker_init'])


@pytest.mark.parametrize(
    ('wrong', 'words'),
    [
        ({'account': None}, 'None is not of type'),
        ({'account': 'a; rm -rf /'}, 'does not match'),
        ({'queue': 'largest'}, 'is not one of'),
        ({'filesystems': ['home eagle']}, 'does not match'),
        ({'checkpoint_dir': 'checkpoints'}, 'does not match'),
        ({'max_blocks': 1000}, 'maximum'),
        ({'engine': 'ThreadPoolEngine'}, 'Additional properties'),
    ],
)
def test_options_that_cannot_be_used_are_refused(wrong: dict[str, Any], words: str) -> None:
    schema = json.loads((TEMPLATE / 'user_config_schema.json').read_text())
    jsonschema.validate(RIGHT, schema)
    with pytest.raises(jsonschema.ValidationError, match=words):
        jsonschema.validate({**RIGHT, **wrong}, schema)


def test_the_program_refuses_them_too(tmp_path: Path) -> None:
    done = render(tmp_path, {**RIGHT, 'queue': 'largest'})
    assert done.returncode != 0
    assert 'is not one of' in done.stdout + done.stderr


@pytest.mark.parametrize(
    ('wrong', 'words'),
    [
        (
            {'site': {'type': 'polaris'}},
            "the site's type is 'polaris'; it must be one of 'local', 'slurm'",
        ),
        ({'site': 'nowhere'}, "there is no site 'nowhere'"),
        ({'site': {'type': 'local', 'nodes': 2, 'nods': 3}}, 'site local: .*nods'),
        ({'site': {'name': 'polaris', 'account': 'a', 'queue': 'largest'}}, 'largest'),
        ({'checkpoint_dir': 'here'}, "checkpoint_dir is 'here'; it must be an absolute path"),
        ({'policy': {'horizon_s': 0.0}}, 'horizon_s is 0.0'),
        ({'horizon': 3}, "no argument 'horizon'"),
        ({'max_blocks': 0}, 'max_blocks is 0'),
    ],
)
def test_settings_that_cannot_be_used_are_refused(wrong: dict[str, Any], words: str) -> None:
    settings = {'site': {'type': 'local'}, 'checkpoint_dir': '/checkpoints', **wrong}
    with pytest.raises(BadInput, match=words):
        FreeTrainEngine(**settings)
    register()
    with pytest.raises(ClickException, match=words):
        load_config_yaml(json.dumps({'engine': {'type': 'FreeTrainEngine', **settings}}))


def test_what_globus_init_writes_is_rendered_with_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = tmp_path / 'endpoint'
    endpoint.mkdir()
    options = ['--site', 'aurora', '--account', 'climate', '--checkpoint-dir', '/flare/me']
    assert main(['globus-init', str(endpoint), *options]) == 0
    done = render(tmp_path, {}, endpoint)
    assert done.returncode == 0, done.stderr
    register()
    monkeypatch.chdir(tmp_path)
    site = load_config_yaml(done.stdout).engine.executor.provider.site
    assert isinstance(site, PbsSite)
    assert (site.options.account, site.options.queue) == ('climate', 'capacity')
    assert site.options.filesystems == ('home', 'flare')

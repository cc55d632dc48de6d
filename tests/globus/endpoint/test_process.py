"""A user endpoint in a process of its own, that is killed, and one that takes its place."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, FreeTrainClient, LocalSite, Reproducible, same_weights
from parsl_freetrain.executor.globus.registration import FOLDER
from tests.globus.endpoint.cloud import EndpointProcess, OfflineExecutor
from tests.globus.endpoint.test_engine import trainer
from tests.support.programs import run_to_end
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    folder = Path(tempfile.mkdtemp(prefix='ft-', dir='/tmp'))
    yield folder
    shutil.rmtree(folder)


def test_an_endpoint_that_is_killed_and_started_anew_goes_on(tmp_path: Path, short: Path) -> None:
    config = {
        'engine': {
            'type': 'FreeTrainEngine',
            'site': {'type': 'local', 'nodes': 1, 'poll_s': 0.2},
            'max_workers_per_node': 0,
            'min_hole_s': 1.0,
            'checkpoint_dir': str(tmp_path / 'checkpoints'),
            'label': 'killed',
        }
    }
    endpoint = EndpointProcess(json.dumps(config), short)
    settings = {
        'total_epochs': 20,
        'checkpoints': Checkpoints(every_s=0.5, resume='never'),
        'mode': Reproducible(shards=4),
    }
    endpoint.start()
    try:
        with FreeTrainClient(
            executor=OfflineExecutor(endpoint.deliver), look_every_s=0.5, first_backoff_s=0.1
        ) as remote:
            training = remote.submit(trainer(**settings), pause_s=0.02)
            wait_until(
                lambda: (
                    training.checkpoint is not None
                    and training.progress().samples > training.checkpoint.samples > 0
                )
            )
            endpoint.kill()
            begun = training.checkpoint
            assert begun is not None
            endpoint.start()
            far = training.result(LIMIT_S)
            assert remote.trainers()['fit'][1].fragments >= 1
    finally:
        endpoint.stop()
    assert endpoint.lives == 2
    assert far.fragment > begun.fragment
    assert not list((tmp_path / 'checkpoints').glob('fit/old-*')), (
        "'never' was meant for the first submission"
    )
    with freetrain(tmp_path / 'near', LocalSite(nodes=1, poll_s=0.2)):
        near = trainer(**settings)().result(LIMIT_S)
    assert far.samples == near.samples == 20 * 96
    assert same_weights(far, near)


def test_a_fresh_python_knows_the_engine_and_still_runs_a_sitecustomize_behind_it(
    tmp_path: Path,
) -> None:
    (tmp_path / 'sitecustomize.py').write_text('import builtins\nbuiltins.hidden_one = True\n')
    program = (
        'import sys, globus_compute_endpoint.engines as e; assert "parsl" not in '
        'sys.modules or True; '
        'print(getattr(e, "NoSuchEngine", None), e.FreeTrainEngine.__name__, hidden_one)'
    )
    begun = time.monotonic()
    done = run_to_end(
        [sys.executable, '-c', program],
        cwd=tmp_path,
        env={'PYTHONPATH': f'{FOLDER}:{tmp_path}', 'HOME': str(tmp_path)},
        check=True,
    )
    assert done.stdout.split() == ['None', 'FreeTrainEngine', 'True'], (
        f'{done.stderr} {time.monotonic() - begun}'
    )

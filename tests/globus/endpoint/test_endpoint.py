"""A real endpoint process with Globus Compute's own engine; what its SDK's errors mean."""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import globus_sdk
import pytest
import requests
from globus_compute_sdk.errors import TaskExecutionFailed
from globus_compute_sdk.serialize import ComputeSerializer
from globus_sdk.token_storage.validating_token_storage import ExpiredTokenError
from parsl.executors import GlobusComputeExecutor

from parsl_freetrain import Checkpoints, LocalSite, Reproducible, same_weights
from parsl_freetrain.app import freetrain_app
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.remote.client import FreeTrainClient
from parsl_freetrain.remote.orders import run_or_join
from tests.globus.endpoint.cloud import EndpointProcess, OfflineExecutor
from tests.globus.test_client import QUICK, end_run, trainer
from tests.support.programs import FREETRAIN, run_to_end
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[EndpointProcess]:
    """An endpoint as ``globus-compute-endpoint configure`` makes it; its path is short."""
    config = {
        'engine': {
            'type': 'GlobusComputeEngine',
            'address': '127.0.0.1',
            'max_workers_per_node': 2,
            'provider': {'type': 'LocalProvider', 'min_blocks': 0, 'max_blocks': 1},
        }
    }
    folder = Path(tempfile.mkdtemp(prefix='ft-', dir='/tmp'))
    made = EndpointProcess(json.dumps(config), folder)
    made.start()
    yield made
    made.kill()
    end_run(tmp_path / 'far')
    shutil.rmtree(folder)


def test_a_killed_endpoint_goes_on_anew(tmp_path: Path, endpoint: EndpointProcess) -> None:
    settings = {'total_epochs': 10, 'mode': Reproducible(shards=4)}
    settings['checkpoints'] = Checkpoints(every_s=0.5, resume='never')
    sdk = OfflineExecutor(endpoint.deliver)
    with FreeTrainClient(executor=sdk, checkpoint_dir=str(tmp_path / 'far'), **QUICK) as remote:
        assert all(one.fits for one in remote.compare_versions(LIMIT_S))
        assert sdk.submit(math.factorial, 4).result(LIMIT_S) == 24
        training = remote.submit(trainer(**settings), pause_s=0.1)
        wait_until(lambda: training.checkpoint is not None and training.checkpoint.samples > 0)
        endpoint.kill()
        begun = training.checkpoint
        assert begun is not None
        endpoint.start()
        far = training.result(LIMIT_S)
        assert far.fragment > begun.fragment
        parsls = GlobusComputeExecutor(executor=sdk, label='polaris')
        with FreeTrainClient(
            executor=parsls, checkpoint_dir=str(tmp_path / 'far'), **QUICK
        ) as again:
            assert again.attach('fit').result(LIMIT_S) == far
    with freetrain(tmp_path / 'near', LocalSite(nodes=1, poll_s=0.2)):
        near = trainer(**settings)().result(LIMIT_S)
    assert far.samples == near.samples == 10 * 96
    assert same_weights(far, near)


def test_an_endpoint_needs_nothing_of_ours_to_unpack_the_function() -> None:
    sent = ComputeSerializer().serialize(run_or_join)
    program = (
        'import sys; sys.modules["parsl_freetrain"] = None\n'
        'from globus_compute_sdk.serialize import ComputeSerializer\n'
        'function = ComputeSerializer().deserialize(sys.stdin.read())\n'
        'print(function(b"order", "/bin/echo").decode())\n'
    )
    done = run_to_end([sys.executable, '-c', program], input=sent)
    assert done.stdout.strip() == '-m parsl_freetrain.remote.endpoint', done.stderr


def http(status: int, said: str = 'no') -> globus_sdk.GlobusAPIError:
    """The error that the SDK makes of a response."""
    response = requests.Response()
    response.status_code = status
    response._content = json.dumps({'code': 'X', 'reason': said, 'message': said}).encode()
    response.headers['Content-Type'] = 'application/json'
    response.request = requests.Request(
        'POST', 'https://compute.api.globus.org/v3/endpoints'
    ).prepare()
    return globus_sdk.GlobusAPIError(response)


class Failing(OfflineExecutor):
    """Fails so often, and then never answers."""

    def __init__(self, error: BaseException, times: int) -> None:
        super().__init__(lambda *_: None)
        self.error, self.times = error, times

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return super().submit(fn, *args, **kwargs)


WHERE: dict[str, Any] = {'checkpoint_dir': '/far', 'site': 'local', 'look_every_s': 0.05}


def test_what_will_not_pass_is_a_sentence() -> None:
    for error, words in (
        (http(401), 'The login to Globus has expired.*log in again by running'),
        (http(403), 'The login to Globus has expired, or does not allow'),
        (ExpiredTokenError(1), 'The login to Globus has expired'),
        (
            http(404, 'endpoint unknown'),
            r'refuses the endpoint \(HTTP 404: .*check the endpoint id',
        ),
        (http(422), 'user_endpoint_config'),
        (
            TaskExecutionFailed('Traceback\nNo module named parsl_freetrain'),
            r'cannot be run at the endpoint \(No module named parsl_freetrain\)',
        ),
    ):
        with FreeTrainClient(executor=Failing(error, 99), **WHERE) as remote:
            with pytest.raises(BadInput, match=words):
                remote.submit(freetrain_app(total_epochs=1)(fit)).result(LIMIT_S)
            with pytest.raises(BadInput, match=words):
                remote.trainers()


@pytest.mark.parametrize(
    'error', [http(500), http(429), ConnectionError('no network'), TimeoutError()]
)
def test_what_passes_is_sent_again(error: BaseException) -> None:
    executor = Failing(error, 3)
    with FreeTrainClient(executor=executor, **WHERE) as remote:
        training = remote.submit(freetrain_app(total_epochs=1)(fit))
        wait_until(lambda: executor.open)
        assert not training.done()
        with pytest.raises(TimeoutError, match='did not answer within 0.1 s'):
            remote.trainers(0.1)
    assert training.done()


def test_doctor_without_a_login_says_how_to_log_in(tmp_path: Path) -> None:
    """The real SDK, which asks for a login in words of its own."""
    endpoint = ('--endpoint', '11111111-1111-1111-1111-111111111111')
    its_own = {'HOME': str(tmp_path), 'PYTHONPATH': str(ROOT)}
    done = run_to_end([*FREETRAIN, 'doctor', *endpoint, '--json'], more_env=its_own, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert 'log in again by running python -c' in json.loads(done.stdout)['endpoint']['error']

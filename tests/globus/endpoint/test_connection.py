"""What the errors of Globus's own SDK mean to a user."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import globus_sdk
import pytest
import requests
from globus_compute_sdk.errors import TaskExecutionFailed
from globus_sdk.token_storage.validating_token_storage import ExpiredTokenError

from parsl_freetrain.app import freetrain_app
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.remote import FreeTrainClient
from tests.globus.endpoint.cloud import OfflineExecutor
from tests.support.programs import run_to_end
from tests.support.training import fit
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.parametrize(
    ('error', 'words'),
    [
        (http(401), 'The login to Globus has expired.*log in again by running'),
        (http(403), 'The login to Globus has expired, or does not allow'),
        (ExpiredTokenError(1), 'The login to Globus has expired'),
        (
            http(404, 'endpoint unknown'),
            r'Globus Compute refuses the endpoint \(HTTP 404: .*check the endpoint id',
        ),
        (http(422), 'user_endpoint_config'),
        (
            TaskExecutionFailed('Traceback\nFUNCTION_NOT_ALLOWED'),
            r'does not run FreeTrainEngine.*\(FUNCTION_NOT_ALLOWED\)',
        ),
    ],
)
def test_what_will_not_pass_is_a_sentence(error: BaseException, words: str) -> None:
    with FreeTrainClient(executor=Failing(error, 99)) as remote:
        with pytest.raises(BadInput, match=words):
            remote.submit(freetrain_app(total_epochs=1)(fit)).result(LIMIT_S)
        with pytest.raises(BadInput, match=words):
            remote.trainers()


@pytest.mark.parametrize(
    'error',
    [
        http(500),
        http(429),
        ConnectionError('no network'),
        TimeoutError(),
        RuntimeError('SDK thread quit'),
    ],
)
def test_what_passes_is_sent_again(error: BaseException) -> None:
    executor = Failing(error, 3)
    with FreeTrainClient(executor=executor, first_backoff_s=0.01) as remote:
        training = remote.submit(freetrain_app(total_epochs=1)(fit))
        while not executor.open:
            assert not training.done()
            time.sleep(0.01)
        assert training.backoff.failures == 3
        with pytest.raises(TimeoutError, match='did not answer within 0.1 s'):
            remote.trainers(0.1)
    assert training.done()


def test_a_plain_function_is_refused() -> None:
    with (
        FreeTrainClient(executor=Failing(TimeoutError(), 0)) as remote,
        pytest.raises(BadInput, match="'fit' is a plain function: decorate it with @freetrain_app"),
    ):
        remote.submit(fit)  # type: ignore[arg-type]


def test_it_is_an_executor_that_may_be_left_while_trainers_train() -> None:
    remote = FreeTrainClient(executor=Failing(TimeoutError(), 0))
    assert isinstance(remote, Executor)
    app = freetrain_app(total_epochs=1)(fit)
    results = remote.map(app, [0.1, 0.2], timeout=0.01)
    assert [one.name for one in remote._follower.trainings()] == ['fit-0', 'fit-1']
    with pytest.raises(TimeoutError):
        next(results)
    remote.shutdown(wait=False)
    assert not remote._follower.trainings()
    with pytest.raises(BadInput, match='this FreeTrainClient is closed'):
        remote.submit(app)


def test_one_of_endpoint_and_executor_is_needed() -> None:
    for wrong in ({}, {'endpoint_id': 'x', 'executor': OfflineExecutor(lambda *_: None)}):
        with pytest.raises(BadInput, match='needs an endpoint_id, or an executor'):
            FreeTrainClient(**wrong)  # type: ignore[arg-type]


def test_doctor_without_a_login_says_how_to_log_in(tmp_path: Path) -> None:
    """The real SDK, which asks for a login in words of its own."""
    done = run_to_end(
        [
            sys.executable,
            '-m',
            'parsl_freetrain.cli.main',
            'doctor',
            '--endpoint',
            '11111111-1111-1111-1111-111111111111',
            '--json',
        ],
        cwd=tmp_path,
        more_env={'HOME': str(tmp_path), 'PYTHONPATH': str(ROOT)},
    )
    assert done.returncode == 1, done.stderr
    assert 'log in again by running python -c' in json.loads(done.stdout)['endpoint']['error']

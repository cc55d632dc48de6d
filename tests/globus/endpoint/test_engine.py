"""FreeTrainEngine in this process, ordered by a FreeTrainClient: real messages, real ranks, real
kills.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from globus_compute_endpoint.engines import GlobusComputeEngine
from globus_compute_sdk.errors import TaskExecutionFailed
from parsl.executors import GlobusComputeExecutor
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider

from parsl_freetrain import (
    BadInput,
    Checkpoints,
    FreeTrainApp,
    FreeTrainClient,
    LocalSite,
    Reproducible,
    Scaling,
    TrainerFailed,
    freetrain_app,
    same_weights,
)
from parsl_freetrain.cli.doctor.asking import ask_endpoint
from parsl_freetrain.cli.doctor.checks import findings
from parsl_freetrain.executor.globus import protocol as orders
from parsl_freetrain.executor.globus.engine import FreeTrainEngine
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary
from tests.globus.endpoint.cloud import OfflineExecutor, to_engine
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

SCALING = {1: 1.0, 2: 1.9, 4: 3.5}


@contextmanager
def endpoint(folder: Path, **settings: Any) -> Iterator[OfflineExecutor]:
    """A running engine; what is given is the SDK's executor for it."""
    engine = FreeTrainEngine(
        checkpoint_dir=str(folder / 'checkpoints'),
        **{
            'site': {'type': 'local', 'nodes': 2, 'poll_s': 0.2},
            'max_workers_per_node': 0,
            'min_hole_s': 1.0,
            'policy': {'horizon_s': 20.0},
            **settings,
        },
    )
    engine.start(endpoint_id=uuid.uuid4(), run_dir=str(folder / 'run'))
    try:
        sdk = OfflineExecutor(to_engine(engine))
        sdk.engine = engine
        yield sdk
    finally:
        engine.shutdown()


def trainer(**settings: Any) -> FreeTrainApp:
    return freetrain_app(
        **{'max_nodes': 1, 'total_epochs': 2, 'scaling': Scaling(rate=SCALING), **settings}
    )(fit)


def test_a_trainer_is_preempted_and_finishes_with_the_same_weights(tmp_path: Path) -> None:
    settings = {
        'total_epochs': 20,
        'checkpoints': Checkpoints(every_s=0.5),
        'mode': Reproducible(shards=4),
        'scaling': Scaling(rate=SCALING, rescale_up_s=0.1, rescale_down_s=0.1),
    }
    with endpoint(tmp_path / 'far') as sdk, FreeTrainClient(executor=sdk) as remote:
        training = remote.submit(trainer(max_nodes=2, **settings), pause_s=0.02)
        wait_until(lambda: training.progress().samples > 200)
        assert training.running()
        for job in sdk.engine.executor.blocks_to_job_id.values():
            os.kill(int(job), signal.SIGKILL)
        far = training.result(LIMIT_S)
        assert (training.state, training.checkpoint) == ('finished', far)
        assert remote.attach('fit').result(LIMIT_S) == far
        assert remote.trainers()['fit'][1].preempted == 1
    with freetrain(tmp_path / 'near', LocalSite(nodes=1, poll_s=0.2)):
        near = trainer(**settings)().result(LIMIT_S)
    assert far.samples == near.samples == 20 * 96
    assert same_weights(far, near)
    journal = Journal(tmp_path / 'far' / 'checkpoints' / 'ledger.journal')
    assert summary(journal.history())['blocks_killed'] >= 1


def test_what_goes_wrong_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint(tmp_path) as sdk, FreeTrainClient(executor=sdk) as remote:
        failed = remote.submit(trainer(), fail_at=40, trainer_name='failing')
        with pytest.raises(
            TrainerFailed,
            match=r"ValueError: no more after 40 samples.*fragment 1 of trainer 'failing'.*\.log",
        ):
            failed.result(LIMIT_S)
        assert (
            remote.submit(trainer(), trainer_name='failing').result(LIMIT_S).samples == 192
        )  # repaired, it goes on under its name
        with pytest.raises(
            BadInput, match="no trainer 'unheard' since its start, it has 'failing'"
        ):
            remote.attach('unheard').result(LIMIT_S)
        with pytest.raises(BadInput, match='belongs to another|seed'):
            remote.submit(trainer(mode=Reproducible(seed=7)), trainer_name='failing').result(
                LIMIT_S
            )
        with pytest.raises(BadInput, match='one of its arguments is a future'):
            remote.submit(trainer(), failed)
        with pytest.raises(BadInput, match='have 70.* bytes.*paths'):
            remote.submit(trainer(), b'x' * 7_000_001)
        with monkeypatch.context() as patch:
            patch.setattr(
                'parsl_freetrain.remote.sending.modules_needed',
                lambda *_: ('torch', 'no_such_module'),
            )
            with pytest.raises(
                BadInput, match='needs the module no_such_module, which the endpoint'
            ):
                remote.submit(trainer(), trainer_name='needy').result(LIMIT_S)
        with monkeypatch.context() as patch:
            old = {**orders.versions_here(), 'python': '3.9.1', 'dill': '9.9'}
            for module in ('client', 'sending'):
                patch.setattr(f'parsl_freetrain.remote.{module}.versions_here', lambda: old)
            with pytest.raises(
                BadInput,
                match=r'python is 3\.9\.1 here and 3\..* at the endpoint, dill is 9\.9 here',
            ):
                remote.submit(trainer(), trainer_name='old').result(LIMIT_S)
            assert [c.name for c in remote.compare_versions() if not c.fits] == ['python', 'dill']
            [found] = findings({'endpoint': ask_endpoint('far', None, sdk)})
            assert found.state == 'bad'
        assert all(c.fits for c in remote.compare_versions())
        [found] = findings({'endpoint': ask_endpoint('far', None, sdk)})
        assert found.state == 'ok'
        assert remote.trainers().keys() == {'failing'}


def test_a_laptop_that_slept_finds_its_training_again_and_cancels_it(tmp_path: Path) -> None:
    with (
        endpoint(tmp_path) as sdk,
        FreeTrainClient(executor=sdk, first_backoff_s=0.1) as remote,
        FreeTrainClient(executor=sdk) as other,
    ):
        training = remote.submit(trainer(total_epochs=1000), pause_s=0.02)
        wait_until(lambda: training.progress().samples > 100)
        with pytest.raises(
            BadInput, match='is running at this endpoint already, from another submission'
        ):
            other.submit(trainer(total_epochs=1000)).result(LIMIT_S)
        with pytest.raises(BadInput, match='followed by this client already'):
            remote.submit(trainer(total_epochs=1000))
        sdk.away = True
        sdk.lose_all()
        wait_until(lambda: training.state == 'unreachable' and training.backoff.failures >= 2)
        assert training.progress().samples > 100  # what was known last
        sdk.away = False
        wait_until(lambda: training.progress().nodes == 1 and training.running())
        assert training.progress().fragments == 1  # it trained on all the time, and only once
        assert other.attach('fit').cancel()
        with pytest.raises(CancelledError):
            training.result(LIMIT_S)
        assert training.state == 'cancelled'
        assert list((tmp_path / 'checkpoints' / 'fit').glob('ckpt-*'))


def double(number: int) -> int:
    if number < 0:
        raise ArithmeticError('too small')
    return 2 * number


def test_what_else_an_endpoint_is_for(tmp_path: Path) -> None:
    """Ordinary tasks beside trainers; clients that are closed; Parsl's own executor as the way to
    it.
    """
    with endpoint(tmp_path, max_workers_per_node=1) as sdk:
        with FreeTrainClient(executor=sdk) as remote:
            left = remote.submit(trainer(total_epochs=1000), pause_s=0.02)
            assert sdk.submit(double, 21).result(LIMIT_S) == 42
            with pytest.raises(TaskExecutionFailed, match='ArithmeticError: too small'):
                sdk.submit(double, -1).result(LIMIT_S)
            assert not left.done()
        with pytest.raises(TrainerFailed, match=r"goes on at .*: attach\('fit'\)"):
            left.result(LIMIT_S)
        parsls = GlobusComputeExecutor(executor=sdk, label='polaris')
        with FreeTrainClient(executor=parsls) as again:
            found = again.attach('fit')
            assert again.submit(trainer(), trainer_name='second').result(LIMIT_S).samples == 192
            assert found.cancel()
            with pytest.raises(CancelledError):
                found.result(LIMIT_S)
        assert sdk.resource_specification is None


def test_an_endpoint_with_another_engine_is_refused(tmp_path: Path) -> None:
    provider = LocalProvider(launcher=SimpleLauncher(), min_blocks=0, max_blocks=1)  # type: ignore[no-untyped-call]
    engine = GlobusComputeEngine(address='127.0.0.1', provider=provider)
    engine.start(endpoint_id=uuid.uuid4(), run_dir=str(tmp_path))
    try:
        with FreeTrainClient(executor=OfflineExecutor(to_engine(engine))) as remote:
            with pytest.raises(BadInput, match='does not run FreeTrainEngine'):
                remote.trainers()
            with pytest.raises(BadInput, match='does not run FreeTrainEngine'):
                remote.submit(trainer()).result(LIMIT_S)
    finally:
        engine.shutdown()

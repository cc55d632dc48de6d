"""FreeTrainClient and an endpoint of one computer, without Globus Compute (``endpoint/``)."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

import parsl_freetrain as ft
from parsl_freetrain.cli.doctor.measuring import ask_endpoint
from parsl_freetrain.executor.run_lock import FILE
from parsl_freetrain.remote.endpoint import Desk
from parsl_freetrain.remote.orders import Order, OrderAnswer, TrainerStatus, decoded
from parsl_freetrain.remote.run import OrderedRun
from parsl_freetrain.training.process import probe
from parsl_freetrain.training.process.block_lease import read_holder
from parsl_freetrain.training.process.probe import COMPARED, compare, versions
from tests.support.programs import run_to_end
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

QUICK: dict[str, Any] = {
    'site': {'type': 'local', 'nodes': 1, 'poll_s': 0.2},
    'look_every_s': 2.0,  # each look is a process
    'max_workers_per_node': 0,
    'min_hole_s': 1.0,
    'policy': {'horizon_s': 20.0},
}
SLOW = {'total_epochs': 1000, 'checkpoints': ft.Checkpoints(every_s=0.5)}

pytestmark = pytest.mark.usefixtures('nodes_share_a_template')
Connect = Callable[..., ft.FreeTrainClient]


class Endpoint(ThreadPoolExecutor):
    """Runs what it gets on this computer; while ``away``, nothing comes or goes."""

    away = False
    lost = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.away:
            self.lost += 1
            if self.lost % 2:
                raise ConnectionError('no network')
            return Future()  # as the SDK's when its connection is gone
        return super().submit(fn, *args, **kwargs)


def end_run(checkpoint_dir: Path, number: int = signal.SIGTERM) -> None:
    """End the run of a folder, if there is one."""
    holder = read_holder(checkpoint_dir / FILE)
    if holder is not None and holder.lives():
        os.kill(holder.pid, number)
        wait_until(lambda: not holder.lives())


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint(4) as pool:
        yield pool


@pytest.fixture
def connect(endpoint: Endpoint, tmp_path: Path) -> Iterator[Connect]:
    made: list[ft.FreeTrainClient] = []

    def connected(**settings: Any) -> ft.FreeTrainClient:
        folder = str(tmp_path / 'far')
        made.append(
            ft.FreeTrainClient(executor=endpoint, checkpoint_dir=folder, **{**QUICK, **settings})
        )
        return made[-1]

    yield connected
    for each in made:
        each.close()
    end_run(tmp_path / 'far')


def trainer(**settings: Any) -> ft.FreeTrainApp:
    return ft.freetrain_app(
        **{'max_nodes': 1, 'total_epochs': 2, 'scaling': ft.Scaling(rate={1: 1.0}), **settings}
    )(fit)


@pytest.mark.long
def test_a_killed_run_is_followed_by_one_with_the_same_weights(
    connect: Connect, tmp_path: Path
) -> None:
    settings = {
        'total_epochs': 20,
        'checkpoints': ft.Checkpoints(every_s=0.5, resume='never'),  # for the first run only
        'mode': ft.Reproducible(shards=4),
    }
    remote = connect()
    training = remote.submit(trainer(**settings), pause_s=0.02)
    wait_until(lambda: training.checkpoint is not None and training.checkpoint.samples > 0)
    assert training.running()
    begun = training.checkpoint
    end_run(tmp_path / 'far', signal.SIGKILL)
    far = training.result(LIMIT_S)
    assert (training.state, training.checkpoint) == ('finished', far)
    assert begun is not None and far.fragment > begun.fragment
    assert remote.attach('fit').result(LIMIT_S) == far
    assert not list((tmp_path / 'far').glob('fit/old-*'))
    with freetrain(tmp_path / 'near', ft.LocalSite(nodes=1, poll_s=0.2)):
        near = trainer(**settings)().result(LIMIT_S)
    assert far.samples == near.samples == 20 * 96
    assert ft.same_weights(far, near)


def test_a_laptop_that_slept_finds_its_training_again_and_cancels_it(
    connect: Connect, endpoint: Endpoint, tmp_path: Path
) -> None:
    remote, other = connect(), connect()
    training = remote.submit(trainer(**SLOW), pause_s=0.1)
    wait_until(lambda: training.progress().samples > 100)
    with pytest.raises(ft.BadInput, match='is running there, from another'):
        other.submit(trainer(**SLOW)).result(LIMIT_S)
    other.close()
    with pytest.raises(ft.BadInput, match='follows one of this name already'):
        remote.submit(trainer(), trainer_name='fit')
    endpoint.away = True
    wait_until(lambda: training.state == 'unreachable' and endpoint.lost > 2)
    assert training.progress().samples > 100  # what was known last
    endpoint.away = False
    wait_until(training.running)
    assert training.progress().fragments == 1  # it trained on all the time, and only once
    left = connect().attach('fit')
    assert left.cancel()
    with pytest.raises(CancelledError):
        training.result(LIMIT_S)
    assert training.state == 'cancelled'
    assert list((tmp_path / 'far' / 'fit').glob('ckpt-*'))
    remote.close()
    with pytest.raises(ft.BadInput, match='this FreeTrainClient is closed'):
        remote.submit(trainer())


@pytest.mark.long
def test_what_goes_wrong_is_a_sentence(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = connect()
    failed = remote.submit(trainer(), fail_at=40, trainer_name='failing')
    words = r"ValueError: no more after 40 samples.*fragment 1 of trainer 'failing'.*\.log"
    with pytest.raises(ft.TrainerFailed, match=words):
        failed.result(LIMIT_S)
    # Repaired, it goes on under its name.
    assert remote.submit(trainer(), trainer_name='failing').result(LIMIT_S).samples == 192
    with pytest.raises(ft.BadInput, match="no trainer 'unheard' in .*; submit it again"):
        remote.attach('unheard').result(LIMIT_S)
    with pytest.raises(ft.BadInput, match='belongs to another|seed'):
        remote.submit(trainer(mode=ft.Reproducible(seed=7)), trainer_name='failing').result(LIMIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(probe, 'versions', lambda: {**versions(), 'python': '3.9.1'})
        with pytest.raises(
            ft.BadInput, match=r'python is 3\.9\.1 here and 3\..* at the endpoint; '
        ):
            remote.submit(trainer(), trainer_name='old').result(LIMIT_S)
        assert [c.name for c in remote.compare_versions() if not c.fits] == ['python']
    assert remote.trainers().keys() == {'failing'}


def test_what_can_be_told_here_is_refused(
    endpoint: Endpoint, connect: Connect, tmp_path: Path
) -> None:
    remote = connect()
    assert isinstance(remote, Executor)
    with pytest.raises(
        ft.BadInput, match="'fit' is a plain function: decorate it with @freetrain_app"
    ):
        remote.submit(fit)  # type: ignore[arg-type]
    with pytest.raises(ft.BadInput, match='one of its arguments is a future'):
        remote.submit(trainer(), Future())
    with pytest.raises(ft.BadInput, match='have 70.* bytes.*paths'):
        remote.submit(trainer(), b'x' * 7_000_001)
    with pytest.raises(
        ft.BadInput, match='needs a checkpoint_dir at the endpoint, an absolute path'
    ):
        connect(site=None).submit(trainer())
    for wrong in ({}, {'endpoint_id': 'x', 'executor': endpoint}):
        with pytest.raises(ft.BadInput, match='needs an endpoint_id or an executor'):
            ft.FreeTrainClient(**wrong)  # type: ignore[arg-type]
    if importlib.util.find_spec('globus_compute_sdk') is None:
        said = ask_endpoint('x', None)['error']
        assert 'globus_compute_sdk, which is not installed: pip install globus-compute-sdk' in said
    (tmp_path / 'options.json').write_text('[1]')
    with pytest.raises(ft.BadInput, match=r'options\.json cannot be used .*as JSON'):
        ask_endpoint('x', tmp_path / 'options.json')


def test_trainers_submitted_at_once_have_names_of_their_own() -> None:
    silent = SimpleNamespace(submit=lambda *_: Future())
    far: dict[str, Any] = {'executor': silent, 'checkpoint_dir': '/far', 'site': 'local'}
    with ft.FreeTrainClient(**far) as remote, ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: remote.submit(trainer()), range(40)))
    assert len({training.name for training in made}) == 40


def test_a_python_without_the_package_is_told(connect: Connect) -> None:
    for python in ('/nowhere/python', '/bin/false'):
        with pytest.raises((FileNotFoundError, RuntimeError)):
            connect(python=python).compare_versions()


def test_what_answers_a_look_is_quickly_there() -> None:
    code = 'import sys, parsl_freetrain.remote.endpoint; print({"parsl", "torch"} & {*sys.modules})'
    assert run_to_end([sys.executable, '-c', code], check=True).stdout == 'set()\n'


def test_settings_that_cannot_be_used_are_refused() -> None:
    for wrong, words in (
        ({'site': {'type': 'polaris'}}, "no site 'polaris'; .* a type of site .local, slurm"),
        ({'site': 'nowhere'}, "There is no site 'nowhere'"),
        ({'site': {'type': 'local', 'nodes': 2, 'nods': 3}}, "no argument 'nods'; say nodes"),
        ({'site': {'name': 'polaris', 'account': 'a', 'queue': 'largest'}}, 'largest'),
        ({'policy': {'horizon_s': 0.0}}, 'horizon_s is 0.0'),
        ({'horizon': 3}, "no argument 'horizon'"),
        ({'max_blocks': 0}, 'max_blocks is 0'),
    ):
        with pytest.raises(ft.BadInput, match=words):
            ft.FreeTrainExecutor.described({'site': 'local', **wrong}, 'x', '/checkpoints')


def test_a_run_that_cannot_start_fails_its_trainers(connect: Connect) -> None:
    with pytest.raises(ft.BadInput, match="no argument 'horizon'"):
        connect(horizon=3).submit(trainer()).result(LIMIT_S)


def test_a_scheduler_that_does_not_answer_fails_no_trainer(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / 'bin' / 'scontrol'
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\nexit 1\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv('PATH', f'{scontrol.parent}:{os.environ["PATH"]}')
    site = {'type': 'slurm', 'partition': 'batch'}
    training = connect(site=site, look_every_s=60.0).submit(trainer())
    desk = Desk(str(tmp_path / 'far'))
    wait_until(lambda: (found := desk.status('fit')) is not None and 'scontrol' in found.sentence)
    assert not training.done()
    assert desk.names() == {'fit'}


def test_a_folder_that_others_may_write_to_takes_no_orders(tmp_path: Path) -> None:
    Desk(str(tmp_path))
    (tmp_path / '.orders').chmod(0o777)
    with pytest.raises(ft.BadInput, match='Other users may write to folder of orders'):
        Desk(str(tmp_path))


def test_damage_and_a_full_disk_hold_up_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(str(tmp_path))
    for name in ('a', 'b', 'c'):
        desk.place(Order('train', str(tmp_path), trainer=name, request=name))
    desk.path('a', 'order').write_bytes(b'cut')
    desk.path('b', 'order').unlink()
    os.mkfifo(desk.path('b', 'order'))
    desk.path('c', 'status').write_bytes(b'')
    run = OrderedRun(desk, cast(Any, None))
    with monkeypatch.context() as full:
        full.setattr(desk, 'tell', lambda *_: os.mkdir('/nonexistent/file'))
        assert run.look()
    assert desk.names() == {'a', 'b', 'c'} and run.look()
    assert (ended := desk.status('c')) is not None
    assert 'does not say what is trained' in ended.sentence
    assert (damaged := desk.status('a')) is not None and damaged.request == ''
    assert 'does not understand this order' in damaged.sentence
    assert 'a' not in desk.names() and not run.look()


def test_what_another_version_sends_is_bad_input() -> None:
    sent = OrderAnswer(trainers={'t': TrainerStatus('r', 'running')})
    assert decoded(msgspec.msgpack.encode(sent), OrderAnswer) == sent
    for wrong in (None, b'', msgspec.msgpack.encode({'verb': 'train', 'speed': 3}), 7):
        with pytest.raises(ft.BadInput, match='this order: install the same version on both ends'):
            decoded(wrong, Order)


def test_versions_fit_if_what_matters_is_the_same() -> None:
    there = {'python': '3.11.2', 'parsl-freetrain': '2026.11.21', 'cloudpickle': '3.1.2'}
    there['torch'] = '2.13.0+cu126'
    here = {**there, 'python': '3.11.7', 'torch': '2.13.0+cpu', 'cloudpickle': '3.0.0'}
    assert [one.name for one in compare(here, there)] == list(COMPARED)
    assert all(one.fits for one in compare(here, there))
    # A laptop may do without torch, the endpoint may not.
    assert all(one.fits for one in compare({k: v for k, v in here.items() if k != 'torch'}, there))
    assert not all(one.fits for one in compare(here, {**there, 'torch': '-'}))
    for name, version in (('python', '3.12.2'), ('parsl-freetrain', '2026.11.22')):
        assert [c.name for c in compare(here, {**there, name: version}) if not c.fits] == [name]

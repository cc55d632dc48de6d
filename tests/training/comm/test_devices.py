"""Accelerators: whose are which, and how ranks exchange. What torch says of them is replaced."""

import os
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parsl_freetrain import BadInput, FragmentContext, LocalSite
from parsl_freetrain.host.slot import DEVICES_VARIABLE
from parsl_freetrain.training.comm import devices
from parsl_freetrain.training.comm.collectives import is_peer_loss, join
from parsl_freetrain.training.comm.device_faults import device_fault, out_of_memory
from parsl_freetrain.training.comm.devices import CUDA, GLOO, ROCM, XPU, Accelerator, take_devices
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.fragment_order import RankPlace
from tests.support.ranks import order, ranks

VARIABLES = (*ROCM.variables, *XPU.variables)


def test_two_variables_that_hide_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('ROCR_VISIBLE_DEVICES', '0,1')
    assert ROCM.variable == 'ROCR_VISIBLE_DEVICES'
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    with pytest.raises(BadInput, match='unset all but one, as by worker_init="unset CUDA_'):
        assert ROCM.variable
    monkeypatch.delenv('ROCR_VISIBLE_DEVICES')
    monkeypatch.setenv('HIP_VISIBLE_DEVICES', '0')
    assert ROCM.variable == 'HIP_VISIBLE_DEVICES'


def test_the_ranks_of_a_node_share_its_devices() -> None:
    for names, ranks_per_node, shares in (
        ('', 2, ['', '']),
        ('0', 1, ['0']),
        ('0123', 1, ['0123']),
        ('0123', 4, ['0', '1', '2', '3']),
        ('5713', 2, ['57', '13']),
        ('01234', 2, ['01', '23']),
    ):
        assert [
            ''.join(devices.share_of(names, rank, ranks_per_node)) for rank in range(ranks_per_node)
        ] == shares


class Machine:
    """What torch says of devices, and whether it was asked before the variable was set."""

    def __init__(self, kind: Accelerator, count: int, uuid: str = '') -> None:
        self.kind, self.count, self.uuid = kind, count, uuid
        self.asked_by: list[int] = []

    def device_count(self) -> int:
        self.asked_by.append(os.getpid())
        named = os.environ.get(self.kind.variable)
        if named is None:
            return self.count
        known = {str(number) for number in range(self.count)}
        return len([name for name in named.split(',') if name in known or 'GPU-' in name])

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in VARIABLES:
            patch.setenv(name, '')  # so that it is put back
            patch.delenv(name)
        patch.setattr(devices, 'kind_here', lambda: self.kind)
        patch.setattr(torch.accelerator, 'device_count', self.device_count)
        patch.setattr(torch.accelerator, 'set_device_index', lambda index: None)
        patch.setattr(torch, 'zeros', lambda *_, device: None)
        module = SimpleNamespace(get_device_properties=lambda d: SimpleNamespace(uuid=self.uuid))
        patch.setattr(torch, 'get_device_module', lambda device: module)


OF_RANK_1: list[tuple[Accelerator, dict[str, str], int, dict[str, str]]] = [
    (CUDA, {}, 4, {'CUDA_VISIBLE_DEVICES': '2,3'}),
    (CUDA, {'CUDA_VISIBLE_DEVICES': '3,1,-1,2'}, 4, {'CUDA_VISIBLE_DEVICES': '1'}),
    (CUDA, {'CUDA_VISIBLE_DEVICES': '0,GPU-1a'}, 4, {'CUDA_VISIBLE_DEVICES': 'GPU-1a'}),
    (CUDA, {'CUDA_VISIBLE_DEVICES': ''}, 4, {'CUDA_VISIBLE_DEVICES': ''}),
    (CUDA, {}, 0, {}),
    (ROCM, {}, 4, {'HIP_VISIBLE_DEVICES': '2,3'}),
    (ROCM, {'ROCR_VISIBLE_DEVICES': '0,1,2,3'}, 4, {'ROCR_VISIBLE_DEVICES': '2,3'}),
    (XPU, {}, 2, {'ZE_AFFINITY_MASK': '1'}),
]


@pytest.mark.parametrize(('kind', 'given', 'count', 'own'), OF_RANK_1)
def test_a_rank_sees_its_own_devices_before_the_runtime_starts(
    monkeypatch: pytest.MonkeyPatch, kind: Any, given: Any, count: int, own: Any
) -> None:
    machine = Machine(kind, count, uuid='1a')
    machine.install(monkeypatch)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    device = take_devices(1, 2)
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == own
    # What is counted in this process is counted when the variable has been set.
    assert device.type == (kind.device if any(own.values()) else 'cpu')
    assert len(machine.asked_by) == (device.type != 'cpu')
    if device.type != 'cpu':
        assert os.uname().nodename in devices.name_of(device)


@pytest.mark.parametrize(
    ('how', 'slots', 'count', 'devices_'),
    [
        ('share', 2, 0, ['', '']),
        ('share', 2, 1, ['0', '0']),
        ('share', 2, 5, ['0,1', '2,3']),
        ('own', 2, 2, ['0', '1']),
        ('none', 2, 2, ['', '']),
    ],
)
def test_the_slots_of_this_computer_divide_its_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, how: str, slots: int, count: int, devices_: Any
) -> None:
    for number in range(slots):
        Machine(CUDA, count).install(monkeypatch)
        monkeypatch.setenv(DEVICES_VARIABLE, f'{how} {number} {slots}')
        assert devices.count_visible() == len(devices_[number].split(',')) * bool(devices_[number])
        device = take_devices(0, 1)
        assert device.type == ('cuda' if devices_[number] else 'cpu')
        assert os.environ.get('CUDA_VISIBLE_DEVICES', '') == devices_[number]
        told = f'{slots} slots share {count} devices' in capsys.readouterr().out
        assert told == (how == 'share' and 0 < count < slots)


@pytest.mark.parametrize(
    ('count', 'hidden', 'kinds', 'backends'),
    [
        (0, False, {'cpu'}, {GLOO}),
        (1, False, {'cuda'}, {GLOO}),  # six ranks on one device
        (2, False, {'cuda'}, {GLOO, 'cpu:gloo,cuda:nccl'}),
        (2, True, {'cpu'}, {GLOO}),
    ],
)
def test_a_demonstration_runs_with_any_number_of_devices(
    monkeypatch: pytest.MonkeyPatch, count: int, hidden: bool, kinds: set[str], backends: set[str]
) -> None:
    """The slots of the local site, as ``make demo`` has them, and fragments on any two of them."""
    site, names, found = LocalSite(nodes=6), [], set()
    monkeypatch.setattr(Accelerator, 'has_backend', lambda _: True)
    for slot in site.names:
        Machine(CUDA, count).install(monkeypatch)
        if hidden:
            monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
        for name, value in site._variables(slot).items():
            monkeypatch.setenv(name, value)
        device = take_devices(0, 1)
        found.add(device.type)
        names.append(devices.name_of(device))
    shared = devices.may_share(ranks_may=False)
    gangs = (*combinations(names, 2), names)
    assert found == kinds
    assert {devices.backend_for(gang, CUDA, shared=shared) for gang in gangs} == backends


def test_too_few_devices_are_refused_unless_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(CUDA, 1).install(monkeypatch)
    monkeypatch.setenv(DEVICES_VARIABLE, 'own 1 2')
    with pytest.raises(BadInput, match=r"say LocalSite\(nodes=1\), or LocalSite\(devices='share'"):
        take_devices(0, 1)
    monkeypatch.delenv(DEVICES_VARIABLE)
    with pytest.raises(BadInput, match=r'say ranks=Ranks\(per_node=1\).*\(per_node=2, share_dev'):
        take_devices(0, 2)
    assert take_devices(1, 2, shared=True).type == 'cuda'
    assert os.environ['CUDA_VISIBLE_DEVICES'] == '0'
    assert devices.backend_for(['a 0', 'a 0'], CUDA, shared=True) == GLOO


def test_a_full_shared_device_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)
    no_memory = 'CUDA out of memory. Tried to allocate 2 GiB.'
    assert devices.where_shared(no_memory, False) == no_memory
    monkeypatch.setenv(DEVICES_VARIABLE, 'share 0 2')
    assert "LocalSite(devices='none')" in devices.where_shared(no_memory, False)
    assert devices.where_shared('a is 0', False) == 'a is 0'


@pytest.mark.parametrize(
    ('named', 'uuid'),
    [('MIG-00000000-0000-0000-0000-000000000000', ''), ('7', ''), ('GPU-99', '1a')],
)
def test_missing_devices_get_a_sentence(
    monkeypatch: pytest.MonkeyPatch, named: str, uuid: str
) -> None:
    Machine(CUDA, 4, uuid).install(monkeypatch)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', named)
    with pytest.raises(BadInput, match=f'CUDA_VISIBLE_DEVICES={named} on .* that exist'):
        take_devices(0, 1)


def test_a_uuid_may_be_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(CUDA, 4, '1a2b3c4d-5e6f').install(monkeypatch)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', 'GPU-1a2')
    assert take_devices(0, 1).type == 'cuda'


def test_a_sentence_says_that_devices_are_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(CUDA, 4).install(monkeypatch)
    take_devices(0, 1)
    assert 'has 4 devices, and 1 are used' in capsys.readouterr().out
    take_devices(0, 3)  # here no rank has a second one
    assert 'say ranks=Ranks(per_node=4)' in capsys.readouterr().out


def test_devices_of_a_node_are_counted_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(CUDA, 4)
    machine.install(monkeypatch)
    assert devices.count_visible() == 4
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,GPU-1a')
    assert devices.count_visible() == 2
    assert os.getpid() not in machine.asked_by


def test_ranks_with_devices_use_its_backend_or_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, 'has_backend', lambda _: True)
    for names, kind, backend in (
        (['a 1', 'a 2', 'b 3'], CUDA, 'cpu:gloo,cuda:nccl'),
        (['a 1', 'a 2', 'b 3'], XPU, 'cpu:gloo,xpu:xccl'),
        (['a MIG-1', 'a MIG-2'], CUDA, GLOO),
        (['', ''], CUDA, GLOO),
        (['', ''], None, GLOO),
    ):
        assert devices.backend_for(names, kind) == backend
    for names, words in (
        (['a 1', 'a 2', 'a 1'], 'Several ranks have the device a 1'),
        (['a 1', '', 'a MIG-2'], 'Rank 1, 2 of 3 has no whole device'),
    ):
        with pytest.raises(BadInput, match=words):
            devices.backend_for(names, CUDA)
    monkeypatch.setattr(Accelerator, 'has_backend', lambda _: False)
    with pytest.raises(BadInput, match='has no nccl'):
        devices.backend_for(['a 1', 'a 2'], CUDA)


def test_nccls_interface_stays_as_it_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', '')
    nobody: Any = None
    for set_to, then in (('hsn0,hsn1', 'hsn0,hsn1'), (None, 'lo')):
        monkeypatch.setenv('NCCL_SOCKET_IFNAME', '')
        monkeypatch.delenv('NCCL_SOCKET_IFNAME')
        if set_to is not None:
            monkeypatch.setenv('NCCL_SOCKET_IFNAME', set_to)
        join(order(tmp_path), RankPlace(1, 2, 1, 1, ''), nobody, nobody, '')
        assert os.environ['NCCL_SOCKET_IFNAME'] == then


def tells_its_backend(ctx: FragmentContext) -> None:
    import torch
    import torch.distributed as dist

    total = torch.tensor([ctx.rank])
    dist.all_reduce(total, group=ctx.torch_distributed())
    raise LookupError(f'{dist.get_backend()} {total.item()}')


def test_ranks_without_gpus_agree_on_gloo(fork_server: ForkClient, tmp_path: Path) -> None:
    assert devices.name_of(torch.device('cpu')) == ''
    with ranks(fork_server, order(tmp_path), 3, tmp_path, tells_its_backend) as gang:
        assert {outcome.error.message for outcome in gang.run()} == {'gloo 3'}
        assert all('Tensors are exchanged by gloo' in rank.log.read_text() for rank in gang.ranks)


ECC = 'CUDA error: uncorrectable ECC error encountered'


def test_the_runtimes_own_words_tell() -> None:
    for error, fault in (
        (torch.AcceleratorError(f'{ECC}\nSearch for `cudaErrorECCUncorrectable`'), ECC),
        (RuntimeError(ECC), ECC),  # torch before 2.8
        (RuntimeError('HIP error: unspecified launch failure'), 'HIP error: unspecified launch f'),
        (
            RuntimeError('level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)'),
            'level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)',
        ),
        (torch.AcceleratorError('CUDA error: device-side assert triggered'), ''),
        (torch.OutOfMemoryError('CUDA out of memory.'), ''),
        (ValueError(ECC), ''),
        (RuntimeError('unknown error'), ''),
    ):
        assert device_fault(error).startswith(fault)
        assert bool(device_fault(error)) is bool(fault)
        assert not is_peer_loss(error)
        later = KeyError('raised while it was handled')
        later.__context__ = error
        assert device_fault(later).startswith(fault)


def test_what_says_that_memory_is_short() -> None:
    for error, short in (
        (torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB'), True),
        (torch.AcceleratorError('CUDA error: out of memory'), True),
        (MemoryError(), True),
        (OSError(12, 'Cannot allocate memory'), True),
        (RuntimeError('UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY'), True),
        (RuntimeError(ECC), False),
        (ValueError('the memory is short'), False),
    ):
        assert out_of_memory(type(error).__name__, str(error)) is short
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert out_of_memory(raised.type.__name__, str(raised.value))

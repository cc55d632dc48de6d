"""Which errors say that a device is broken."""

import pytest
import torch

from parsl_freetrain.training.comm.collectives import is_peer_loss
from parsl_freetrain.training.comm.device_faults import device_fault, out_of_memory

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


def test_the_cpu_allocators_words_are_known() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert out_of_memory(raised.type.__name__, str(raised.value))

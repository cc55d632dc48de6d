"""Which errors say that a device is broken."""

from __future__ import annotations

import pytest
import torch

from parsl_freetrain.training.comm.collectives import is_peer_loss
from parsl_freetrain.training.comm.faults import device_fault

ECC = 'CUDA error: uncorrectable ECC error encountered'


@pytest.mark.parametrize(
    ('error', 'fault'),
    [
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
    ],
)
def test_the_runtimes_own_words_tell(error: Exception, fault: str) -> None:
    assert device_fault(error).startswith(fault)
    assert bool(device_fault(error)) is bool(fault)
    assert not is_peer_loss(error)
    later = KeyError('raised while it was handled')
    later.__context__ = error
    assert device_fault(later).startswith(fault)

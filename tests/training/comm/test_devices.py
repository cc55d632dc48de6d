"""GPUs: whose are which, and by what ranks exchange tensors. There is none here, so what CUDA
itself does is not tested.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.training.comm.devices import (
    GLOO,
    GLOO_AND_NCCL,
    VISIBLE_VARIABLE,
    backend_for,
    name_of,
    share_of,
    take_gpus,
)
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import WarmParent
from tests.support.ranks import order, ranks


@pytest.mark.parametrize(
    ('gpus', 'ranks_per_node', 'shares'),
    [
        ('', 2, ['', '']),
        ('0', 1, ['0']),
        ('0123', 1, ['0123']),
        ('0123', 4, ['0', '1', '2', '3']),
        ('5713', 2, ['57', '13']),
        ('01234', 2, ['01', '23']),
        ('01', 5, ['0', '1', '0', '1', '0']),
    ],
)
def test_the_ranks_of_a_node_share_its_gpus(
    gpus: str, ranks_per_node: int, shares: list[str]
) -> None:
    assert [
        ''.join(share_of(gpus, rank, ranks_per_node)) for rank in range(ranks_per_node)
    ] == shares


@given(st.integers(0, 20), st.integers(1, 20))
def test_every_rank_has_a_gpu_where_there_is_one_and_none_waits_for_another(
    gpus: int, ranks_per_node: int
) -> None:
    shares = [
        share_of([str(gpu) for gpu in range(gpus)], rank, ranks_per_node)
        for rank in range(ranks_per_node)
    ]
    assert {len(share) for share in shares} == {max(1, gpus // ranks_per_node) if gpus else 0}
    given_out = [gpu for share in shares for gpu in share]
    users = {gpu: given_out.count(gpu) for gpu in given_out}
    assert max(users.values(), default=0) - min(users.values(), default=0) <= 1
    assert gpus < ranks_per_node or set(users.values()) <= {1}


@pytest.mark.parametrize(
    ('named', 'count', 'own'),
    [
        (None, 4, '2,3'),
        ('4,5,6,7', 4, '6,7'),
        ('GPU-1a, GPU-2b', 2, 'GPU-2b'),
        ('3,1,-1,2', 2, '1'),
        (None, 0, None),
        ('', 0, ''),
    ],
)
def test_what_is_visible_already_is_shared(
    monkeypatch: pytest.MonkeyPatch, named: str | None, count: int, own: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: count)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)  # else CUDA would begin here
    monkeypatch.setenv(VISIBLE_VARIABLE, named or '')
    if named is None:
        monkeypatch.delenv(VISIBLE_VARIABLE)
    assert take_gpus(1, 2) == torch.device('cpu')
    assert os.environ.get(VISIBLE_VARIABLE) == own


@pytest.mark.parametrize(
    ('gpus', 'nccl', 'backend'),
    [
        (['a GPU-1', 'a GPU-2', 'b GPU-3'], True, GLOO_AND_NCCL),
        (['a GPU-1', 'a GPU-2', 'b GPU-3'], False, GLOO),
        (['a GPU-1', 'a GPU-2', 'a GPU-1'], True, GLOO),
        (['a GPU-1', ''], True, GLOO),
        (['', ''], True, GLOO),
    ],
)
def test_nccl_is_for_ranks_of_which_each_has_a_gpu_of_its_own(
    gpus: list[str], nccl: bool, backend: str
) -> None:
    assert backend_for(gpus, nccl=nccl) == backend


def tells_its_backend(ctx: FragmentContext) -> None:
    import torch
    import torch.distributed as dist

    total = torch.tensor([ctx.rank])
    dist.all_reduce(total)
    raise LookupError(f'{dist.get_backend()} {total.item()}')


def test_ranks_without_gpus_agree_on_gloo(warm: WarmParent, tmp_path: Path) -> None:
    assert name_of(torch.device('cpu')) == ''
    with ranks(warm, order(tmp_path), 3, tmp_path, tells_its_backend) as gang:
        assert {outcome.error.message for outcome in gang.run()} == {'gloo 3'}
        assert all('Tensors are exchanged by gloo' in rank.log.read_text() for rank in gang.ranks)

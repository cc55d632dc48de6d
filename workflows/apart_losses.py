"""Loss at equal samples of a training in rounds, beside synchronous training; prints JSON lines.

``python -m workflows.apart_losses digits|gpt [--overlap] [bfloat16|int8] [SEED ...]`` trains in one
process what ``mode=DiLoCo(...)`` (with ``overlap=1``, ``compress=``) trains in pieces: the same
parts of the same global batches, an optimizer for each replica, and the outer step, which is
torch's SGD (these are the same: tests/training/checkpoint/test_handed_in.py). Random numbers of
dropout are others than in fragments.
"""

from __future__ import annotations

import copy
import json
import sys
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parsl_freetrain.training.checkpoint.outer_means import compressed, decompressed
from parsl_freetrain.training.data.sample_order import GlobalOrder
from workflows.digits import digits
from workflows.digits_models import cnn
from workflows.gpt_apart_model import UNSEEN, Gpt, loss_of
from workflows.manual_text import Windows, manual

STEPS, REPLICAS, LENGTHS = 500, (1, 2, 4, 8), (10, 50, 250)


def gpt() -> tuple[nn.Module, Any, int, Any, Any, list[Any]]:
    numbers, letters = manual()
    length = 32
    test = length * UNSEEN + 1
    data, unseen = Windows(numbers[:-test], length), Windows(numbers[-test:], length)
    held = [torch.stack(one) for one in zip(*(unseen[i] for i in range(UNSEEN)), strict=True)]
    net = Gpt(len(letters), length, 32, 2)
    how = lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.9, 0.98))  # noqa: E731
    return net, data, 16, how, loss_of, held


def images() -> tuple[nn.Module, Any, int, Any, Any, list[Any]]:
    x, y, *held = digits()
    how = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4)  # noqa: E731
    return cnn(), list(zip(x, y, strict=True)), 32, how, F.cross_entropy, held


def train(
    what: str, seed: int, replicas: int, length: int, lr: float, overlap: bool, how: str
) -> dict[str, Any]:
    """``length`` 0: synchronous training; ``lr`` 1: no outer optimizer; ``how``: compression."""
    torch.manual_seed(seed)
    net, data, batch, optimizer_of, loss_of, held = gpt() if what == 'gpt' else images()
    order = GlobalOrder(len(data), batch, seed, total_samples=STEPS * batch, drop_last=True)
    nets = [copy.deepcopy(net) for _ in range(replicas)]
    optimizers = [optimizer_of(one.parameters()) for one in nets]
    outer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9 * (lr < 1), nesterov=lr < 1)
    begun = copy.deepcopy(net)
    for step, one in enumerate(order.batches(0), 1):
        for k in range(replicas):
            own = [data[index] for index in one.indices[k::replicas]]
            x, y = (torch.stack(t) for t in zip(*own, strict=True))
            optimizers[k].zero_grad()
            loss_of(nets[k](x), y).backward()
            if what == 'gpt':
                nn.utils.clip_grad_norm_(nets[k].parameters(), 1.0)
            optimizers[k].step()
        if length and step % length == 0:
            after = copy.deepcopy(net) if overlap else net  # what the next round begins with
            exchange(net, nets, begun, outer, how)
            for other in (begun, *nets):
                other.load_state_dict(after.state_dict())
    return {
        'what': what, 'seed': seed, 'replicas': replicas, 'steps': length, 'outer': lr < 1,
        'overlap': overlap, 'compress': how,
        'loss': evaluate(net if length else nets[0], loss_of, held),
        'rounds': STEPS // length if length else 0,
        'bytes': sum(4 * p.numel() for p in net.parameters()),
    }  # fmt: skip


@torch.no_grad()
def exchange(
    net: nn.Module, nets: list[nn.Module], begun: nn.Module, outer: torch.optim.Optimizer, how: str
) -> None:
    every = (one.parameters() for one in (begun, *nets))
    for p, before, *others in zip(net.parameters(), *every, strict=True):
        changes = [before - other for other in others]
        if how:
            changes = [decompressed(compressed(one, how), how, one) for one in changes]
        p.grad = torch.stack(changes).mean(0) if how else before - torch.stack(others).mean(0)
    outer.step()
    for b, *others in zip(net.buffers(), *(one.buffers() for one in nets), strict=True):
        b.copy_(torch.stack(others).float().mean(0) if b.is_floating_point() else others[0])


@torch.no_grad()
def evaluate(net: nn.Module, loss_of: Any, held: list[Tensor]) -> float:
    return float(loss_of(net.eval()(held[0]), held[1]))


if __name__ == '__main__':
    torch.set_num_threads(1)
    how = next((one for one in sys.argv if one in ('bfloat16', 'int8')), '')
    late, seeds = '--overlap' in sys.argv, [one for one in sys.argv[2:] if one.isdigit()]
    for seed in map(int, seeds or ('1', '2', '3')):
        for replicas, length, lr in [(1, 0, 1.0), *product(REPLICAS, LENGTHS, (0.7, 1.0))]:
            print(json.dumps(train(sys.argv[1], seed, replicas, length, lr, late, how)), flush=True)

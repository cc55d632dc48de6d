"""torch's compiler is imported when something is compiled, and works as if it had been there."""

import sys
from pathlib import Path

import pytest

from parsl_freetrain import FragmentContext
from tests.support.programs import run_to_end
from tests.support.ranks import all_finish, order, running_fork_server

LATE = """
import sys
import torch
from parsl_freetrain.training.process import lazy_dynamo
from parsl_freetrain.training.steps.determinism import demand_determinism
lazy_dynamo.install()
demand_determinism(warn_only=False)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
def step(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
step(torch.ones(2, 4))
asked = torch._dynamo.utils.get_optimize_ddp_mode()  # as DistributedDataParallel does
assert 'torch._dynamo.utils' not in sys.modules
with lazy_dynamo.hidden():
    assert 'torch._dynamo' not in sys.modules
kept = sys.modules['torch._dynamo']
import torch._dynamo.testing
assert torch._dynamo is kept is sys.modules['torch._dynamo']
assert asked == torch._dynamo.utils.get_optimize_ddp_mode()
assert torch._dynamo.utils is sys.modules['torch._dynamo.utils']
assert torch._dynamo.testing is sys.modules['torch._dynamo.testing']
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
assert vars(zero_grad)['__dynamo_disable'] is not zero_grad
counter = torch._dynamo.testing.CompileCounter()
torch.compile(step, backend=counter)(torch.ones(2, 4))
assert counter.frame_count
import torch._inductor.config
assert torch._inductor.config.deterministic and torch.are_deterministic_algorithms_enabled()
lazy_dynamo.install()
assert torch._dynamo is kept
"""


@pytest.mark.long
def test_the_compiler_comes_when_it_is_asked_for() -> None:
    ran = run_to_end([sys.executable, '-c', LATE])
    assert ran.returncode == 0, ran.stderr


def test_ranks_that_compile_nothing_do_not_import_the_compiler(tmp_path: Path) -> None:
    def train(ctx: FragmentContext) -> None:
        import sys

        import torch

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = ctx.prepare(model, optimizer)
        for (x,) in ctx.loop(torch.utils.data.TensorDataset(torch.ones(4, 2)), 4):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        found = {'torch._dynamo.utils', 'torch.distributed.fsdp'} & sys.modules.keys()
        assert not found, found

    # A server of its own: another test may have needed the compiler.
    with running_fork_server(tmp_path) as server:
        for mode in ('throughput', 'reproducible'):
            folder = tmp_path / mode
            all_finish(server, order(folder, total_samples=8, mode=mode), 2, folder, train)

"""For scripts that expect to be started by torchrun, such as those with accelerate."""

import os

from parsl_freetrain.training.comm import world
from parsl_freetrain.training.loop.context import FragmentContext


def torchrun_environment(ctx: FragmentContext) -> None:
    """Set the variables that torchrun sets, and make a default process group also for one rank. So
    ``accelerate.Accelerator()`` and other libraries find their place: which process is the main
    one, on which device, and how tensors are gathered.

    Call it at the beginning of the function. Models and optimizers go to ``ctx.prepare``, and not
    to ``accelerator.prepare``; data go to ``ctx.loop``.

    ``LOCAL_RANK`` is the number of the rank's device: a rank sees only its own devices, so with
    accelerators it is 0 on all ranks. On CPUs it is the number of the rank on its node.
    ``MASTER_ADDR`` and ``MASTER_PORT`` lead nowhere: a library has to use the process group that is
    there.
    """
    local = ctx.local_rank if ctx.device.type == 'cpu' else ctx.device.index or 0
    os.environ.update(
        RANK=str(ctx.rank),
        WORLD_SIZE=str(ctx.world_size),
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(ctx.spec.ranks.per_node),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT='1',
    )
    world.show()

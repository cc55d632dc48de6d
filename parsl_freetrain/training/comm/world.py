"""The default process group of torch.distributed, which libraries ask whether they are alone. In
reproducible mode a rank trains virtual shards one after the other, so a loss must not exchange: the
group is hidden from ctx.prepare on, unless it was asked for.
"""

import os
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.process import lazy_dynamo

_EXCHANGES = re.compile('gather|reduce|alltoall|all_to_all|broadcast|scatter|send|recv|barrier')
_hidden: ProcessGroup | None = None
_asked = False
_in_body: Callable[[], bool] = bool
check_ends: Callable[[ProcessGroup], object] = bool
"""Raises SealBroken unless a group's connections are among ranks of this fragment."""


def hide() -> None:
    """Hide the default group, unless asked for; calls that need it raise BadInput."""
    global _hidden
    if not _asked:
        _hidden, dist.GroupMember.WORLD = dist.group.WORLD, None
        plain = dist.distributed_c10d._get_default_group
        if not hasattr(plain, '__wrapped__'):
            dist.distributed_c10d._get_default_group = _not_hidden(plain)


def _not_hidden(plain: Callable[[], ProcessGroup]) -> Callable[[], ProcessGroup]:
    @wraps(plain)
    def default_group() -> ProcessGroup:
        if _hidden is not None:
            raise BadInput(
                'The default group of torch.distributed was asked for after ctx.prepare. In '
                'reproducible mode there is none, since each pass in the body of ctx.loop is one '
                'virtual shard, which is alone: outside of the body, say ctx.torch_distributed() '
                'before; for exchanges in the body, use mode=Throughput().'
            )
        return plain()

    return default_group


def show() -> ProcessGroup:
    """The group of all ranks, as the default one from now on; of one rank, a group is made."""
    global _hidden, _asked
    _asked = True
    if _hidden is not None:
        dist.GroupMember.WORLD, _hidden = _hidden, None
    if dist.group.WORLD is None:
        os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
        with lazy_dynamo.hidden():
            dist.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def refuse_in_body(in_body: Callable[[], bool]) -> None:
    """BadInput for exchanges in a body: ranks would wait where they have unlike shards."""
    global _in_body
    _in_body = in_body
    for name in filter(_EXCHANGES.search, dir(ProcessGroup)):
        if not hasattr(plain := getattr(ProcessGroup, name), '__wrapped__'):
            setattr(ProcessGroup, name, _outside(plain, name))


def _outside(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(plain)
    def exchange(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if _in_body():
            raise BadInput(
                f'In the body of ctx.loop, something exchanges tensors by torch.distributed ('
                f'{name.strip("_")} of a process group). In reproducible mode each pass is one '
                'virtual shard, which is alone, whatever other ranks train at the time: leave the '
                'exchange out (ddp=False of a loss), do it in ctx.before_step, or use '
                'mode=Throughput().'
            )
        return plain(group, *args, **kwargs)

    return exchange

"""Which accelerators a rank uses, and which backend exchanges the tensors of a fragment's ranks."""

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.slot import NONE, OWN, SHARE, devices_here
from parsl_freetrain.training.comm.device_faults import out_of_memory

GLOO = 'gloo'
_PART = 'MIG-'  # a part of a GPU


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator: torch's names, and the environment variables that restrict a process
    to some devices; one is set, as ROCm applies them one after the other.
    """

    device: str
    variables: tuple[str, ...]
    backend: str

    @property
    def variable(self) -> str:
        """The variable that is set already, or else the first one. Raises BadInput if
        ROCR_VISIBLE_DEVICES is set with another one: ROCm would number the devices anew.
        """
        given = [name for name in self.variables if name in os.environ]
        if len(given) > 1 and given[-1] == ROCR:
            raise BadInput(
                f'{" and ".join(given)} are set on {platform.node()}, and hide devices from each '
                f'other: unset all but one, as by worker_init="unset {" ".join(given[:-1])}".'
            )
        return given[0] if given else self.variables[0]

    def has_backend(self) -> bool:
        return bool(getattr(dist, f'is_{self.backend}_available')())


ROCR = 'ROCR_VISIBLE_DEVICES'
CUDA = Accelerator('cuda', ('CUDA_VISIBLE_DEVICES',), 'nccl')
ROCM = Accelerator('cuda', ('HIP_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES', ROCR), 'nccl')
XPU = Accelerator('xpu', ('ZE_AFFINITY_MASK',), 'xccl')


def kind_here() -> Accelerator | None:
    """What this torch is built for; None: only CPUs. It starts no device runtime."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    if found.type == 'cuda':
        return ROCM if torch.version.hip else CUDA
    return XPU if found.type == 'xpu' else None


def share_of(
    names: Sequence[str], local_rank: int, ranks_per_node: int, *, shared: bool = False
) -> tuple[str, ...]:
    """As many devices as the others', or one each; BadInput if too few and not ``shared``."""
    if not 0 < len(names) < ranks_per_node:
        each = len(names) // ranks_per_node
        return tuple(names[local_rank * each : (local_rank + 1) * each])
    if not shared:
        raise BadInput(
            f'There are {ranks_per_node} ranks on {platform.node()} and {len(names)} devices '
            f'({", ".join(names)}): say ranks=Ranks(per_node={len(names)}), use nodes with more '
            f'devices, or say Ranks(per_node={ranks_per_node}, share_devices=True), with which '
            'ranks on one device exchange tensors through the CPU.'
        )
    return (names[local_rank * len(names) // ranks_per_node],)


def of_slot(names: Sequence[str]) -> Sequence[str]:
    """This slot's devices on the local site, else all; BadInput if there are too few."""
    told = devices_here()
    if told is None or not names:
        return names
    how, number, slots = told
    if how == NONE:
        return []
    if how == OWN and len(names) < slots:
        raise BadInput(
            f'This computer has {len(names)} devices ({", ".join(names)}) for {slots} slots: say '
            f"LocalSite(nodes={len(names)}), or LocalSite(devices='share') so that several slots "
            'use one.'
        )
    return share_of(names, number, slots, shared=True)


def may_share(ranks_may: bool) -> bool:
    """Whether several ranks may have one device: a trainer's that says so, and local slots'."""
    told = devices_here()
    return ranks_may or (told is not None and told[0] == SHARE)


def backend_for(names: Sequence[str], kind: Accelerator | None, *, shared: bool = False) -> str:
    """torch.distributed's backends: gloo for tensors on CPUs, for parts of GPUs (MIG) and for ranks
    that share a device; else the kind's own. ``names``: :func:`name_of` by rank. Raises BadInput
    for ranks that do not fit together, or without a backend.
    """
    if kind is None or not any(names) or all(_PART in name for name in names):
        return GLOO
    without = [str(rank) for rank, name in enumerate(names) if not name or _PART in name]
    if without:
        raise BadInput(
            f'Rank {", ".join(without)} of {len(names)} has no whole device, and the others have: '
            'use nodes of one kind, or hide the devices of all (CUDA_VISIBLE_DEVICES=).'
        )
    if len(set(names)) < len(names):
        if shared:
            return GLOO
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(
            f'Several ranks have the device {twice}, and {kind.backend} allows one each: give each '
            'block nodes of its own, or say ranks=Ranks(share_devices=True).'
        )
    if not kind.has_backend():
        raise BadInput(
            f'This torch ({torch.__version__}) has no {kind.backend}, which exchanges tensors '
            f'between {kind.device} devices: install one that has it.'
        )
    return f'cpu:{GLOO},{kind.device}:{kind.backend}'


def count_visible() -> int:
    """How many the ranks of this node can share. It starts no device runtime in this process."""
    kind = kind_here()
    if kind is None:
        return 0
    visible = _visible(kind)
    try:
        return len(of_slot(visible))
    except BadInput:  # the ranks say it
        return len(visible)


def take_devices(local_rank: int, ranks_per_node: int, *, shared: bool = False) -> torch.device:
    """Restrict this process to its share of the visible devices, before anything uses one. Returns
    the first, or the CPU. Raises BadInput for too few that are not ``shared``, or that do not
    exist.
    """
    kind = kind_here()
    if kind is None:
        return torch.device('cpu')
    all_visible = _visible(kind)
    visible = of_slot(all_visible)
    own = share_of(visible, local_rank, ranks_per_node, shared=shared)
    if not own:
        return torch.device('cpu')
    os.environ[kind.variable] = ','.join(own)
    if local_rank == 0:
        _tell(all_visible, visible, ranks_per_node)
    _check(kind, own)
    device = torch.device(kind.device, 0)
    torch.accelerator.set_device_index(0)
    torch.zeros(1, device=device)  # starts the runtime, so that it can be seeded
    return device


def _tell(all_visible: Sequence[str], visible: Sequence[str], ranks_per_node: int) -> None:
    told = devices_here()
    if told is not None and len(all_visible) < told[2]:
        print(
            f'{told[2]} slots share {len(all_visible)} devices of this computer: ranks on one '
            "device exchange tensors through the CPU. LocalSite(devices='none') trains on CPUs, "
            f'LocalSite(nodes={len(all_visible)}) has a device for each slot.'
        )
    elif len(visible) < ranks_per_node:
        print(f'{ranks_per_node} ranks share {len(visible)} devices, as share_devices=True says.')
    elif len(visible) > ranks_per_node:
        print(
            f'This node has {len(visible)} devices, and {ranks_per_node} are used, one by each '
            f'rank: to use all, say ranks=Ranks(per_node={len(visible)}), and train on nodes that '
            'have as many.'
        )


def where_shared(message: str, ranks_may: bool) -> str:
    """The message, with what helps if a device that several ranks may share has no memory left."""
    if not may_share(ranks_may) or not out_of_memory('', message):
        return message
    return (
        f'{message} Several ranks may share this device and its memory: use fewer slots or ranks '
        "(LocalSite(nodes=...), Ranks(per_node=...)), LocalSite(devices='none'), a smaller "
        'batch, or more virtual shards.'
    )


def name_of(device: torch.device) -> str:
    kind = kind_here()
    if device.type == 'cpu' or kind is None:
        return ''
    named = os.environ[kind.variable]
    return f'{platform.node()} {named if named.startswith(_PART) else _uuid(device) or named}'


def computes_as(device: torch.device) -> str:
    """What decides the bits of a result beside the program: processor, device, version of torch."""
    name = torch.backends.cpu.get_cpu_capability()
    if device.type != 'cpu':
        name += f' {torch.get_device_module(device).get_device_name(device)}'
    return f'{name}, torch {torch.__version__}'


def peak_memory(device: torch.device) -> int:
    """The most bytes needed: on the device, or of the process for a CPU; 0: unknown."""
    if device.type != 'cpu':
        return int(torch.get_device_module(device).max_memory_allocated(device))
    with suppress(OSError, ValueError):
        for line in Path('/proc/self/status').read_text().splitlines():
            name, _, size = line.partition(':')
            if name == 'VmHWM':
                return 1024 * int(size.split()[0])
    return 0


def visible_as() -> str:
    variable = (kind_here() or CUDA).variable
    return f'{variable}={os.environ.get(variable)}'


def _visible(kind: Accelerator) -> list[str]:
    named = os.environ.get(kind.variable)
    if named is None:
        return [*map(str, range(int(apart(torch.accelerator.device_count) or 0)))]
    names = [name.strip() for name in named.split(',') if name.strip()]
    return names[: names.index('-1')] if '-1' in names else names


def apart(what: Callable[[], object]) -> str:
    """What a child process finds: it may start the runtime, which then reads the variable."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, str(what()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return found


def _check(kind: Accelerator, own: Sequence[str]) -> None:
    count = torch.accelerator.device_count()
    found = _uuid(torch.device(kind.device, 0)) if count and own[0].startswith('GPU-') else ''
    if count != len(own) or (found and not found.startswith(own[0].removeprefix('GPU-')[:8])):
        raise BadInput(
            f'{kind.variable}={",".join(own)} on {platform.node()} names {len(own)} devices, and '
            f'torch finds {count}{f", the first with UUID {found}" if found else ""}: name devices '
            'that exist (nvidia-smi -L, rocm-smi and xpu-smi discovery list them).'
        )


def _uuid(device: torch.device) -> str:
    return str(getattr(torch.get_device_module(device).get_device_properties(device), 'uuid', ''))

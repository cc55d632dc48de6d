"""What four ranks of one node read when a fragment starts; run by ``make bench``."""

import json
import statistics
from pathlib import Path

import torch
from torch import nn

from parsl_freetrain.training.checkpoint.state import Position, collect, content_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import sort_out
from parsl_freetrain.training.loop.context import FragmentContext
from tests.benchmarks.workload import MACHINE, optimizer_of
from tests.support import template
from tests.support.ranks import order, ranks, running_fork_server

RANKS, ROUNDS = 4, 3
PARAMETERS = 125_000_000  # 4 bytes each, and as much momentum: 1 GB
WAYS = {'each': 'every rank reads', 'one': 'one reads and sends to the others'}


def read_in_turns(ctx: FragmentContext, path: str, rounds: int) -> None:
    """Raises an error that says what ranks have read (bytes), their CPU time and time (s)."""
    import time

    import torch.distributed as dist

    from parsl_freetrain.training.checkpoint.parts import Contents
    from parsl_freetrain.training.checkpoint.source import Opened, read_state
    from parsl_freetrain.training.checkpoint.transport import Disk
    from parsl_freetrain.training.checkpoint.transport_memory import NodeMemory
    from parsl_freetrain.training.checkpoint.transport_peers import PeerTransport

    contents = Contents.read(Path(path))

    def read_once() -> None:
        memory, disk = NodeMemory('none', contents.files), Disk(Path(path), contents.files)
        ways = PeerTransport(ctx._run.peers, memory, disk, contents.files, ctx.world_size)
        Opened(path, contents, ways).load()

    def bytes_read() -> int:
        return int(Path('/proc/self/io').read_text().split()[1])

    found: dict[str, list[list[float]]] = {'each': [], 'one': []}
    for _ in range(rounds):
        for way, rows in found.items():
            dist.barrier()
            before = bytes_read(), time.process_time(), time.monotonic()
            if way == 'one':
                read_once()
            else:
                read_state(path)
            dist.barrier()
            spent = torch.tensor(
                [bytes_read() - before[0], time.process_time() - before[1]], dtype=torch.float64
            )
            dist.all_reduce(spent)
            rows.append([*spent.tolist(), time.monotonic() - before[2]])
    raise LookupError(json.dumps(found))


def test_what_the_ranks_of_a_node_read(tmp_path: Path) -> None:
    model = nn.Linear(PARAMETERS // 1000, 1000, bias=False)
    optimizer = optimizer_of(model)
    optimizer.state[model.weight]['momentum_buffer'] = torch.zeros_like(model.weight)
    state = collect(content_of(sort_out((model, optimizer))), Position(8, 100, 7, 64, 8, 0))
    store = PosixCheckpointStore(tmp_path / 'store', 'digits')
    saved = store.save(state.write, samples=8, fragment=1, metrics={})
    store.folder.rename(tmp_path / 'elsewhere')  # what the ranks do not read by themselves
    path = str(tmp_path / 'elsewhere' / Path(saved.path).name)
    del model, optimizer, state
    with (
        template.shared(tmp_path / 'template.log'),
        running_fork_server(tmp_path) as fork_server,
        ranks(fork_server, order(tmp_path), RANKS, tmp_path, read_in_turns, path, ROUNDS) as gang,
    ):
        found = json.loads(gang.run()[0].error.message)
    print(f'\nA state of 1 GB, {RANKS} ranks on one node ({MACHINE}), median of {ROUNDS}, in turns')
    base = [statistics.median(column) for column in zip(*found['each'], strict=True)]
    for way, rows in found.items():
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(
            f'  {WAYS[way]:34} {middle[0] / 1e9:.2f} GB read, {middle[1]:.1f} s of CPU, '
            f'{middle[2]:.1f} s; relative: '
            + ', '.join(f'{mine / theirs:.2f}' for mine, theirs in zip(middle, base, strict=True))
        )

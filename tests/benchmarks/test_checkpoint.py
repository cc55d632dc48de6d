"""How long a checkpoint holds up training, beside torch's own plain save; ``make bench``."""

import os
import shutil
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed.checkpoint.state_dict_saver as dcp
from torch import nn

from parsl_freetrain.core.model.events import CheckpointSaved
from parsl_freetrain.training.checkpoint.block_digests import BLOCK, FileImage
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.state import Position, collect, content_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import Prepared, sort_out
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from tests.benchmarks.workload import MACHINE, optimizer_of
from tests.support.ranks import channel_pair, order

ROUNDS = 9
WIDTH, LAYERS = (
    1024,
    25,
)  # 25 x 1024 x 1024 numbers of 4 bytes: 105 MB, and as much again for the momentum


def things() -> tuple[Prepared, Callable[[], None]]:
    """A model with its optimizer, and a step of training it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = optimizer_of(model)
    x = torch.randn(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    step()
    return sort_out((model, optimizer)), step


def test_how_long_a_checkpoint_holds_up_training(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings('ignore', 'torch.distributed is disabled')
    prepared, step = things()
    model, optimizer = prepared.models[0], prepared.optimizers[0]
    channel, member = channel_pair()
    ordered = order(tmp_path, checkpoint_every_s=1e-9)
    keeper = Checkpointer(
        PosixCheckpointStore(tmp_path / 'store', 'digits'), ordered, channel, None
    )
    times: dict[str, list[float]] = {
        name: [] for name in ('plain', 'pause', 'write', 'at once', 'step', 'step beside')
    }
    for number in range(1, ROUNDS + 1):
        now = Position(number, 100, 0, 50, 10, 0)
        # Each comes first in turn: who writes after another finds less free memory for the file.
        ways = [None, True, False]
        for later in ways[number % 3 :] + ways[: number % 3]:
            began = time.monotonic()
            if later is None:
                dcp.save(
                    {'model': model.state_dict(), 'optimizer': optimizer.state_dict()},
                    checkpoint_id=str(tmp_path / 'plain'),
                )
                times['plain'].append(time.monotonic() - began)
                shutil.rmtree(tmp_path / 'plain')
                continue
            save = keeper.save_beside if later else keeper.save_and_stop  # which lets go of nothing
            save(lambda now=now: collect(content_of(prepared), now), number, {})  # type: ignore[misc]
            held = time.monotonic() - began
            times['pause' if later else 'at once'].append(held)
            while keeper._background.busy:
                began = time.monotonic()
                step()
                times['step beside'].append(time.monotonic() - began)
            keeper.settled()
            while not isinstance(message := member.recv(), CheckpointSaved):
                pass  # that it is being saved
            if later:
                times['write'].append(message.checkpoint.seconds)
        for _ in range(3):
            began = time.monotonic()
            step()
            times['step'].append(time.monotonic() - began)
        shutil.rmtree(ordered.store)
    channel.close()
    member.close()
    print(
        f'\nA checkpoint of {sum(t.nbytes for t in prepared.tensors()) / 1e6:.0f} MB of '
        'weights with as much of momentum, '
        f'seconds, median of {ROUNDS} ({MACHINE}, 1 thread, {tmp_path})'
    )
    base = statistics.median(times['plain'])
    for name, label in (
        ('plain', 'plain synchronous DCP: training held up'),
        ('pause', 'fragment: training held up'),
        ('write', 'fragment: written beside training'),
        ('at once', 'fragment, at its end: written at once'),
        ('step', 'a training step'),
        ('step beside', 'a training step beside a checkpoint'),
    ):
        middle = statistics.median(times[name])
        print(
            f'  {label:42} {middle:7.3f}  {middle / base:6.3f}  (from '
            f'{min(times[name]):.3f} to {max(times[name]):.3f})'
        )


def test_how_fast_parts_are_written(tmp_path: Path) -> None:
    """With digests and durably, beside dd on the same file system, in turns."""
    size, forks = int(os.environ.get('BENCH_BYTES', 1_500_000_000)), get_context('fork')
    print(f'\nParts of {size / 1e9:.1f} GB, GB/s ({MACHINE}, load {os.getloadavg()[0]:.0f})')

    def dd(count: int) -> float:
        def one(number: int) -> subprocess.Popen[bytes]:
            out, blocks = tmp_path / f'dd-{number}', size // count // BLOCK
            command = ['dd', 'if=/dev/zero', f'of={out}', f'bs={BLOCK}', f'count={blocks}']
            return subprocess.Popen([*command, 'conv=fsync', 'status=none'])

        began = time.monotonic()
        assert not any(program.wait() for program in list(map(one, range(count))))
        return time.monotonic() - began

    def ours(count: int) -> float:
        ready = forks.Barrier(count + 1)

        def write(number: int) -> None:
            content = bytes_of(torch.ones(size // count // BLOCK * BLOCK, dtype=torch.uint8))
            ready.wait()
            FileImage(content).write(tmp_path / f'ours-{number}')

        writers = [forks.Process(target=write, args=(number,)) for number in range(count)]
        for writer in writers:
            writer.start()
        ready.wait()
        began = time.monotonic()
        for writer in writers:
            writer.join()
            assert not writer.exitcode
        return time.monotonic() - began

    for count in (1, 2, 4):
        taken: dict[str, list[float]] = {'dd': [], 'ours': []}
        for turn in range(6):
            way = (dd, ours)[turn % 2]
            taken[way.__name__].append(way(count))
            for file in tmp_path.iterdir():
                file.unlink()
        plain, own = (size / 1e9 / statistics.median(each) for each in taken.values())
        print(f'  {count} writers: dd {plain:.2f}, ours {own:.2f}, {own / plain:.2f} of it')

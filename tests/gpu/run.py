"""``make gpu``: what needs an accelerator, and how fast training is on one.

``python -m tests.gpu.run [--out DIR] [--minutes M] [--cases NAME ...] [--device cpu]``: the cases,
the most valuable ones first. After each, DIR has the table so far (gpu.md) and all figures
(gpu.json), so that a limit of time loses nothing. The exit status is 1 if a case failed. Needs
torch, msgspec, cloudpickle, tblib, numpy, psutil and xxhash, and neither Parsl nor an installation.
"""

import argparse
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.core.model.events import CheckpointSaved, FragmentStarted
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.comm.devices import apart, count_visible
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import Outcome
from tests.gpu import in_rank
from tests.gpu.networks import WORKLOADS
from tests.support.ranks import Ranks, order, ranks
from tests.support.waiting import LIMIT_S, wait_until

Figures = dict[str, Any]
CASE_S = 100.0


@dataclass
class Machine:
    """Where the cases run.

    Attributes
    ----------
    devices
        Number of devices; 0: the CPU stands for one.
    tiny
        What stands before the names of networks: on a CPU, small ones are trained.
    seconds
        How long the steps of a case are measured at least.
    ends_at
        When the time is over, on the monotonic clock.
    """

    folder: Path
    fork_server: ForkClient
    devices: int
    seconds: float
    ends_at: float = math.inf
    runs: int = field(default=0)

    @property
    def patience_s(self) -> float:
        """How long a case may take that hangs; a CPU may be busy with other work."""
        left_s = max(self.ends_at - time.monotonic(), 20.0)
        return min(CASE_S, left_s) if self.devices else LIMIT_S

    @property
    def tiny(self) -> str:
        return '' if self.devices else 'tiny '

    @property
    def counts(self) -> list[int]:
        """Numbers of ranks that have a device each."""
        return [count for count in (1, 2, 4) if count <= (self.devices or 4)]

    def new_folder(self) -> Path:
        """A folder of its own for each run: one that goes on trains nothing if it is done."""
        self.runs += 1
        return self.folder / str(self.runs)

    @contextmanager
    def gang(
        self, folder: Path, count: int, function: Callable[..., Any], *args: Any, **changes: Any
    ) -> Iterator[Ranks]:
        """The ranks of one fragment; ``changes`` as in :func:`tests.support.ranks.order`."""
        fragment = changes.pop('fragment', 1)
        ordered = order(folder, fragment, **{'per_node': count, **changes})
        with ranks(self.fork_server, ordered, count, folder, function, *args) as gang:
            yield gang


def finished(gang: Ranks, timeout_s: float) -> Outcome:
    """Wait for the end of a fragment; fails with the log if it has not trained to the total."""
    outcomes = gang.run(timeout_s)
    log = gang.ranks[0].log.read_text()
    assert {outcome.how for outcome in outcomes} == {'finished'}, f'{outcomes}\n{log}'
    assert outcomes[0].metrics.get('steps', 0) > 1, f'nothing was trained:\n{log}'
    return outcomes[0]  # type: ignore[no-any-return]


def measure(
    workload: str,
    machine: Machine,
    *,
    plain: int = 0,
    beside: int = 0,
    compiled: str = '',
    count: int = 1,
    **changes: Any,
) -> Figures:
    """Milliseconds of a step, and more."""
    folder = machine.new_folder()
    out = folder / 'figures.json'
    how = {'mode': 'throughput', 'total_samples': 10**9, **changes}
    args = (machine.tiny + workload, plain, beside, compiled, machine.seconds, str(out))
    with machine.gang(folder, count, in_rank.speed, *args, **how) as gang:
        gang.hear(lambda: False, machine.patience_s)
        log = gang.ranks[0].log.read_text()
    assert out.exists(), log[-3000:]
    found: Figures = json.loads(out.read_text())
    assert found['steps'] > 1, found
    said = [line for line in log.splitlines() if 'The device waits for Python' in line]
    if said:
        found['said'] = said[0]
    if machine.devices:
        assert 'device cpu' not in log, log
        if 'device_ms' not in found:
            found['note'] = 'no profile: ' + log[-300:]
    return found


def kill(gang: Ranks, saves: int, timeout_s: float) -> float:
    """Kill the last rank after so many checkpoints; returns when."""
    main, victim = gang.ranks[0], gang.ranks[-1]
    gang.hear(
        lambda: len(main.said(CheckpointSaved)) >= saves or main.status is not None, timeout_s
    )
    assert len(main.said(CheckpointSaved)) >= saves, main.log.read_text()
    victim.process.kill()
    at = time.time()
    gang.hear(lambda: False, timeout_s)
    assert victim.status == -9, victim.log.read_text()
    return at


def final_weights(
    machine: Machine,
    workload: str,
    count: int,
    *,
    killed: bool = False,
    compiled: str = '',
    **changes: Any,
) -> dict[str, Any]:
    """The weights of a training of 40 steps."""
    folder, name = machine.new_folder(), machine.tiny + workload
    total, args = 40 * WORKLOADS[name].batch, (in_rank.train, name)
    if killed:
        how = {**changes, 'total_samples': total, 'checkpoint_every_s': 0.05}
        with machine.gang(folder, count, *args, 1.0, compiled, **how) as gang:
            kill(gang, 1, machine.patience_s)
    how = {**changes, 'total_samples': total, 'fragment': 1 + killed}
    with machine.gang(folder, count, *args, 0.0, compiled, **how) as gang:
        outcome = finished(gang, machine.patience_s)
        began_at = gang.ranks[0].said(FragmentStarted)[0].samples
    assert (outcome.samples, began_at > 0) == (total, killed)
    return load_weights(outcome.path or '')


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


def same_bits(machine: Machine) -> Figures:
    """Undisturbed, killed, and on other numbers of ranks: the same weights, which are new ones."""
    first = final_weights(machine, 'mixed', 1, mode='reproducible')
    torch.manual_seed(0)
    fresh = WORKLOADS[machine.tiny + 'mixed'].network().state_dict()
    assert not any(torch.equal(first[name], fresh[name]) for name in ('words.weight', 'mix.weight'))
    again = final_weights(machine, 'mixed', 1, killed=True, mode='reproducible')
    runs = {'1 rank, killed': again}
    for count in machine.counts[1:]:
        runs[f'{count} ranks'] = final_weights(machine, 'mixed', count, mode='reproducible')
    for how, other in runs.items():
        assert not differing(first, other), how
    return {'same': True, 'runs': ['1 rank', *runs]}


def graph_bits(machine: Machine) -> Figures:
    """With CUDA graphs, killed and undisturbed have the same bits, nearly those without."""
    whole, killed, without = (
        final_weights(machine, 'mixed', 1, killed=k, compiled=c, mode='reproducible', shards=4)
        for k, c in ((False, in_rank.GRAPH), (True, in_rank.GRAPH), (False, 'default'))
    )
    assert not differing(whole, killed)
    torch.testing.assert_close(whole, without, rtol=1e-3, atol=1e-4)
    return {'same': True, 'same_as_without_graphs': not differing(whole, without)}


def two_on_one_device(machine: Machine) -> Figures:
    """Two ranks that share a device: the bits of one, and what it costs to exchange by the CPU."""
    one, two = (
        final_weights(machine, 'mixed', count, mode='reproducible', share_devices=True)
        for count in (1, 2)
    )
    assert not differing(one, two)
    how: Figures = {'mode': 'reproducible', 'shards': 4, 'share_devices': True}
    return {'same': True, **measure('gpt', machine, count=2, **how)}


def other_seed_other_bits(machine: Machine) -> Figures:
    """That the comparison can fail."""
    one, other = (final_weights(machine, 'mixed', 1, mode='reproducible', seed=s) for s in (7, 8))
    assert not torch.equal(one['mix.weight'], other['mix.weight'])
    return {'differ': True}


def checkpoints_and_kill(machine: Machine) -> Figures:
    """Pauses of the first, next and last checkpoint; a kill, memory after it, the next step."""
    folder, name = machine.new_folder(), machine.tiny + 'gpt'
    how = {'mode': 'throughput', 'checkpoint_every_s': 2.0 if machine.devices else 0.1}
    free = _free(machine)
    with machine.gang(folder, 1, in_rank.train, name, total_samples=10**9, **how) as gang:
        killed_at = kill(gang, 2, machine.patience_s)
        end_s = time.time() - killed_at
        saved = [said.checkpoint for said in gang.ranks[0].said(CheckpointSaved)]
    wait_until(lambda: free - _free(machine) < 64 * 2**20, 'memory is not free again', 10)
    batch = WORKLOADS[name].batch
    total = saved[-1].samples + 50 * batch
    launched_at = time.time()
    with machine.gang(folder, 1, in_rank.train, name, fragment=2, total_samples=total, **how) as g:
        outcome = finished(g, machine.patience_s)
        started = g.ranks[0].said(FragmentStarted)[0]
        last = [said.checkpoint for said in g.ranks[0].said(CheckpointSaved)]
    assert started.samples >= saved[-1].samples, 'the last checkpoint was not taken'
    size = sum(f.stat().st_size for f in Path(outcome.path or '').rglob('*') if f.is_file())
    return {
        'state_gb': size / 1e9,
        'first_pause_s': saved[0].pause_s,
        'next_pause_s': saved[1].pause_s,
        'written_gb_s': size / 1e9 / saved[1].seconds,
        'last_written_gb_s': size / 1e9 / last[-1].seconds,
        'dd_gb_s': dd(folder / 'beside', size),
        'last_pause_s': last[-1].pause_s,
        'last_step_to_end_s': outcome.idle_s or 0.0,
        'saves_in_the_last_50_steps': len(last),
        'kill_to_end_s': end_s,
        'launch_to_first_step_s': started.at - launched_at,
    }


def dd(file: Path, size: int) -> float:
    """Gigabytes per second with which dd writes as much, durably."""
    count, since = max(1, size >> 26), time.perf_counter()
    how = ('if=/dev/zero', f'of={file}', 'bs=64M', f'count={count}', 'conv=fsync', 'status=none')
    subprocess.run(['dd', *how], check=True)
    return count * 2**26 / 1e9 / (time.perf_counter() - since)


def page_locked(machine: Machine) -> Figures:
    if not machine.devices:
        return {'skipped': 'needs a device'}
    with machine.gang(machine.new_folder(), 1, in_rank.page_locked, total_samples=4) as gang:
        outcome = gang.run(machine.patience_s)[0]
        assert outcome.how == 'finished', gang.ranks[0].log.read_text()
    return {'page_locked': True}


def _free(machine: Machine) -> int:
    """Free memory of the first device in bytes."""
    if not machine.devices:
        return 0
    return int(apart(lambda: torch.get_device_module().mem_get_info(0)[0]))


def reproducible(workload: str, shards: int, **how: Any) -> Callable[[Machine], Figures]:
    """Beside a plain loop that has the same micro-batches and deterministic algorithms, too."""
    return partial(
        measure, workload, mode='reproducible', shards=shards, **{'beside': -shards, **how}
    )


def speeds(workload: str, *shards: int) -> dict[str, Callable[[Machine], Figures]]:
    """How fast the modes are, relative to plain loops."""
    return {
        f'{workload} {count} shard{"s" * (count > 1)}': reproducible(workload, count)
        for count in shards
    }


CASES: dict[str, Callable[[Machine], Figures]] = {
    'bits with a CUDA graph': graph_bits,
    'small gpt 4 shards, CUDA graph': reproducible('small gpt', 4, compiled=in_rank.GRAPH),
    'mixed 4 shards, compiled': reproducible('mixed', 4, compiled='default'),
    'small gpt 4 shards, compiled': reproducible('small gpt', 4, compiled='default'),
    'mixed 4 shards, CUDA graph': reproducible('mixed', 4, compiled=in_rank.GRAPH),
    **speeds('gpt', 1, 4),
    **speeds('resnet', 1, 4),
    'two ranks on one device': two_on_one_device,
    'checkpoints and a kill': checkpoints_and_kill,
    'same bits': same_bits,
    **speeds('resnet', 2),
    'gpt throughput': partial(measure, 'gpt', beside=1),
    'resnet throughput': partial(measure, 'resnet', beside=1),
    **speeds('layers', 1, 4),
    **speeds('gpt', 2),
    **speeds('resnet', 8),
    **speeds('gpt', 8),
    **speeds('layers', 2, 8),
    'another seed, other bits': other_seed_other_bits,
    'page-locked batches': page_locked,
    'gpt plain': partial(measure, 'gpt', plain=1),
    'resnet plain': partial(measure, 'resnet', plain=1),
}
"""By value: where time runs out, the last ones are left."""
NOT_ON_CPUS = ('compiled', 'graph', ' 8 ', ' 2 ', 'layers', 'page-locked')
"""Unless they are asked for: they take long, or say nothing new there."""


def table(found: dict[str, Figures]) -> str:
    """All figures so far, as Markdown."""
    lines = ['| case | figures |', '|---|---|']
    for case, figures in found.items():
        text = ', '.join(
            f'{key} {value:.4g}' if isinstance(value, float) else f'{key} {value}'
            for key, value in figures.items()
            if key not in ('failed', 'steps', 'speed')
        )
        if 'speed' in figures:
            text = f'**{figures["speed"]:.3f}** of a plain loop beside it: {text}'
        if 'failed' in figures:
            text = 'FAILED: ' + figures['failed'].replace('\n', ' ')[-300:]
        lines.append(f'| {case} | {text} |')
    return '\n'.join(lines) + '\n'


@contextmanager
def started(folder: Path) -> Iterator[ForkClient]:
    """A fork server of its own, which has imported torch."""
    log = folder / 'fork_server.log'
    parent = ForkClient.start(f'gpu-{secrets.token_hex(8)}', os.getpid(), str(log))
    try:
        parent.wait_ready(LIMIT_S)
        yield parent
    finally:
        parent.stop()


def main(argv: list[str] | None = None) -> int:
    """Run the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog='python -m tests.gpu.run', description=__doc__)
    parser.add_argument('--out', type=Path, default=Path(os.environ.get('OUT', 'demo-out')))
    parser.add_argument('--minutes', type=float, default=8.0)
    parser.add_argument('--cases', nargs='*', default=[], help='parts of their names')
    parser.add_argument('--device', choices=('accelerator', 'cpu'), default='accelerator')
    parser.add_argument('--seconds', type=float, default=2.5, help='that each case measures')
    options = parser.parse_args(argv)
    if options.device == 'cpu':
        os.environ['CUDA_VISIBLE_DEVICES'] = ''
    devices = 0 if options.device == 'cpu' else count_visible()
    if not devices and options.device != 'cpu':
        print('torch finds no accelerator on this computer; --device cpu stands for one.')
        return 1
    chosen = {
        name: case
        for name, case in CASES.items()
        if any(part in name for part in options.cases)
        or (not options.cases and (devices or not any(part in name for part in NOT_ON_CPUS)))
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='freetrain-gpu-') as folder, started(Path(folder)) as f:
        ends_at = time.monotonic() + 60 * options.minutes
        machine = Machine(Path(folder), f, devices, options.seconds, ends_at)
        found = run(chosen, machine, options.out)
    failed = [name for name, figures in found.items() if 'failed' in figures]
    left = [name for name in chosen if name not in found]
    print(f'{len(found)} cases, failed: {failed or "none"}, left for time: {left or "none"}')
    return 1 if failed else 0


def run(
    chosen: dict[str, Callable[[Machine], Figures]], machine: Machine, out: Path
) -> dict[str, Figures]:
    """Run cases until the time is over; after each, write what was found so far."""
    name = apart(lambda: torch.get_device_module().get_device_name(0)) or 'CPU'
    about = (
        f'{machine.devices} x {name}, torch {torch.__version__}, Python {sys.version.split()[0]}'
    )
    found: dict[str, Figures] = {}
    for case, of in chosen.items():
        if time.monotonic() > machine.ends_at:
            break
        since = time.monotonic()
        try:
            figures = of(machine)
        except Exception as error:  # the other cases still tell something
            traceback.print_exc()
            figures = {'failed': f'{type(error).__name__}: {error}'}
        figures['took_s'] = time.monotonic() - since
        found[case] = figures
        print(case, figures, flush=True)
        text = f'{about}\n\n{table(found)}'
        (out / 'gpu.md').write_text(text)
        (out / 'gpu.json').write_text(json.dumps({'machine': about, 'cases': found}, indent=1))
    print(f'\n{text}')
    return found


if __name__ == '__main__':
    sys.exit(main())

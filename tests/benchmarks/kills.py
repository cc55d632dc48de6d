"""SIGKILL of one of four ranks and of one of four nodes, again and again: ``make kills``."""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.versus import measures
from tests.benchmarks.versus.constants import BATCH
from tests.benchmarks.versus.machine import Step, kill, machine
from tests.benchmarks.versus.plan import NothingTrained, undisturbed, until
from tests.benchmarks.versus.systems.ours import Ours

NODES = 4
KINDS = (measures.RANK, measures.NODE, measures.BLOCK)
LIMIT_S = 120.0
GAP_S = 0.5, 1.5  # of training on all nodes before a kill
_REST = 'the rest of a block killed'
_STEADY = 10  # steps on all nodes before a kill


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.folder:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix='kills-', dir=options.folder))
    chance = random.Random(options.seed)
    runs: list[measures.Run] = []
    left = options.times
    while left > 0:
        times = min(left, options.per_run)
        runs.append(struck(folder / str(len(runs)), times, chance, options.ahead))
        left -= times
        print(f'{options.times - left} of {options.times} done', file=sys.stderr)
    farthest = max(runs, key=lambda run: max(step.position for step in run.steps))
    reference = undisturbed(Ours('reproducible'), folder / 'undisturbed', farthest, 10 * LIMIT_S)
    found = {kind: figures(runs, kind) for kind in KINDS}
    same = [measures.same_bits(run.steps, reference) for run in runs]
    print(table(found))
    print(f'Same bits as undisturbed, by run: {same}')
    (folder / 'kills.json').write_text(json.dumps({**found, 'same bits': same}, indent=1))
    print(f'All figures: {folder}/kills.json')
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='tests.benchmarks.kills', description=__doc__)
    parser.add_argument('--times', type=int, default=100, help='kills of each kind')
    parser.add_argument('--per-run', type=int, default=10, help='kills of each kind in one run')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--ahead', action='store_true', help='with Ranks(ahead=True)')
    parser.add_argument('--folder', help='where the logs are written; default: a temporary folder')
    return parser.parse_args(arguments)


def struck(folder: Path, times: int, chance: random.Random, ahead: bool) -> measures.Run:
    """Train on four nodes (two are one block), kill each so often, and let all come back."""
    system, events = Ours('reproducible', ahead=ahead), list[measures.Event]()
    with machine(folder) as here:
        commanded = time.time()
        system.start(here, [f'node{i}' for i in range(NODES)])

        def steady() -> None:
            since = time.time()

            def enough() -> bool:
                return sum(s.world == NODES and s.begun > since for s in here.steps()) >= (
                    _STEADY * NODES
                )

            if not until(enough, LIMIT_S):
                raise NothingTrained(f'No steps on all nodes within {LIMIT_S:g} s: see {folder}.')
            time.sleep(chance.uniform(*GAP_S))

        def strike(kind: str, nodes: Sequence[str] = ()) -> None:
            processes = (
                [process for node in nodes for process in here.of_node(node)]
                if nodes
                else here.rank(f'node{chance.randrange(NODES)}')
            )
            for node in nodes:
                system.leave(here, node)
            kill(processes)
            events.append(measures.Event(kind, time.time(), NODES - len(nodes)))
            until(lambda: any(step.begun > events[-1].at for step in here.steps()), LIMIT_S)

        def come(nodes: Sequence[str]) -> None:
            events.append(measures.Event(measures.ARRIVAL, time.time(), NODES))
            for node in nodes:
                system.join(here, node)

        for _ in range(times):
            steady()
            strike(measures.RANK)
            steady()
            lone = f'node{chance.choice((2, 3))}'
            strike(measures.NODE, [lone])
            come([lone])
            steady()
            pair = chance.sample(['node0', 'node1'], 2)
            strike(measures.BLOCK, pair[:1])
            strike(_REST, pair[1:])  # only a new block has both again
            come(pair)
        steady()
        return measures.Run(commanded, time.time(), NODES, tuple(events), tuple(here.steps()))


def repeated(steps: Sequence[Step], event: measures.Event, until_s: float) -> int:
    """Steps that some rank had ended before an event, and that were trained again after it."""
    done = max((s.position for s in steps if s.ended <= event.at), default=-BATCH)
    again = min((s.position for s in steps if event.at < s.begun < until_s), default=done + BATCH)
    return max(0, (done - again) // BATCH + 1)


def figures(runs: Sequence[measures.Run], kind: str) -> dict[str, float | int | None]:
    """Seconds from a kill to the end of the next step, and steps repeated, of all kills."""
    seconds: list[float | None] = []
    again: list[int] = []
    for run in runs:
        ends = [*(event.at for event in run.events[1:]), run.ended]
        for event, end in zip(run.events, ends, strict=True):
            if event.kind == kind:
                seconds.append(measures.next_step(run, event))
                again.append(repeated(run.steps, event, end))
    known = [s for s in seconds if s is not None]
    return {
        'kills': len(seconds),
        'not in time': len(seconds) - len(known),
        'median': statistics.median(known) if known else None,
        'p95': p95(known) if known else None,
        'max': max(known, default=None),
        'most steps repeated': max(again, default=0),
    }


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of the values do not exceed."""
    return sorted(values)[-(-len(values) * 95 // 100) - 1]


def table(found: Mapping[str, Mapping[str, float | int | None]]) -> str:
    columns = ('kills', 'not in time', 'median', 'p95', 'max', 'most steps repeated')
    lines = ['| s from a kill to the next step | ' + ' | '.join(columns) + ' |']
    lines.append('|---' * (len(columns) + 1) + '|')
    for kind, of in found.items():
        cells = [f'{v:.2f}' if isinstance(v := of[c], float) else str(v) for c in columns]
        lines.append(f'| {kind} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())

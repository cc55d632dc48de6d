"""The long form of the experiment: ``python -m tests.slurm.zero_delay FOLDER [SEED ...]`` writes
``zero-delay.json`` and prints which aims are reached: a median delay of one backfill interval, at
most 10 s and the kill wait for every job, training in 60 % of long idle times. ``SEEDS`` leaves out
mixes in which the scheduler by itself takes jobs in another order.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import KILL_WAIT_S, MODES, TICK_S, Filling, Outcome, side_by_side
from tests.slurm.mix import Mix, untidy

NODES = 5
SEEDS = (2, 8, 9, 13, 16)
STOP_S = 10.0
LEAST_SHARE = 0.6


def mix_of(seed: int) -> Mix:
    """About 23 jobs within four minutes."""
    return untidy(seed, NODES, 14, 240.0, 60.0)


def main(folder: str, *seeds: str) -> None:
    """Write ``zero-delay.json`` into ``folder``."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    reached: list[dict[str, bool]] = []
    print(
        '| mix | mode | jobs | median delay, s | maximum | scatter '
        '| of all idle time trained | of times over 60 s | not reached |'
    )
    print('|---|---|---|---|---|---|---|---|---|')
    for seed in map(int, seeds or SEEDS):
        with tempfile.TemporaryDirectory() as scratch:
            each: dict[str, Filling] = {'alone': None, 'again': None, **MODES}
            runs = side_by_side(each, mix_of(seed), NODES, Path(scratch))
        for mode in MODES:
            said = found[f'{mode}, mix {seed}'] = told(runs, mode)
            delays = said['delays_s']
            reached.append(aims(delays, TICK_S, STOP_S + KILL_WAIT_S))
            missed = ', '.join(aim for aim, yes in reached[-1].items() if not yes)
            print(
                f'| {seed} | {mode} | {len(delays)} | {median(delays):.1f} | {max(delays):.1f} '
                f'| {said["scatter_s"]:.1f} '
                f'| {100 * said["share"]:.0f} % | {100 * said["share_of_long"]:.0f} % | {missed} |',
                flush=True,
            )
    (out / 'zero-delay.json').write_text(json.dumps(found, indent=1) + '\n')
    for aim in reached[0]:
        times = sum(each[aim] for each in reached)
        print(f'{aim}: {"yes" if times == len(reached) else "no"} ({times} of {len(reached)})')
    for mode in MODES:
        idle = [said['idle_node_s'] for run, said in found.items() if run.startswith(f'{mode},')]
        long = sum(each['long'] for each in idle)
        share = sum(each['in_long'] for each in idle) / long if long else 1.0
        print(
            f'{mode}: {100 * LEAST_SHARE:.0f} % of all idle times over 60 s trained: '
            f'{"yes" if share >= LEAST_SHARE else "no"} ({100 * share:.0f} %)'
        )


def aims(delays: list[float], tick_s: float, most_s: float) -> dict[str, bool]:
    """Whether a run reached each of the aims for delays."""
    return {
        f'median within {tick_s:g} s': median(delays) <= tick_s,
        f'maximum within {most_s:g} s': max(delays) <= most_s,
    }


def told(runs: Mapping[str, Outcome], mode: str) -> dict[str, Any]:
    """All that is drawn and said about one mix; times in seconds since the first submission."""
    alone, again, filled = runs['alone'], runs['again'], runs[mode]
    idle = idle_of(filled)
    return {
        'delays_s': [round(each, 1) + 0.0 for each in delays_s([alone, again], filled)],  # no -0
        'scatter_s': round(scatter_s(alone, again), 1),
        'share': round(idle.share, 3),
        'share_of_long': round(idle.share_of_long, 3),
        'idle_node_s': {name: round(value) for name, value in asdict(idle).items()},
        'commands': filled.commands,
        'load_average': [round(value, 1) for value in os.getloadavg()],
        'cpus': os.cpu_count(),
        'alone': alone.document(),
        'filled': filled.document(),
    }


if __name__ == '__main__':
    main(*sys.argv[1:])

"""How much later jobs start, for every seed of a range: ``python -m tests.slurm.delay_all FILE
[FIRST LAST]``. A seed is a mix, on three clusters without FreeTrain and once with it; even ones
share nodes. At the end: the distribution, and the cause of each delay.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tests.slurm.delay import delays_s, idle_of, later_s
from tests.slurm.experiment import (
    Filling,
    Machine,
    Outcome,
    SlurmMachine,
    own_cluster,
    side_by_side,
)
from tests.slurm.mix import Mix, sharing
from tests.slurm.zero_delay import NODES, mix_of
from tests.support import template
from tests.support.slurm import Cluster

CPUS = 4


def filled(backfill: dict[str, Any], preemptible: dict[str, Any]) -> dict[str, Filling]:
    """The runs with FreeTrain, given where its blocks go in each mode."""
    return {
        'backfill': backfill,
        'two runs': (backfill, backfill),
        'preemptible': {**preemptible, 'mode': 'preemptible'},
    }


WITH = filled({'partition': 'batch'}, {'partition': 'scavenger'})
WITHOUT = 'alone', 'again', 'once more'


def mix_for(seed: int) -> Mix:
    mix = mix_of(seed)
    return sharing(seed, mix, CPUS) if seed % 2 == 0 else mix


@contextmanager
def shared(name: str, nodes: int) -> Iterator[Machine]:
    with Cluster.running(nodes, within='/tmp', SLURM_CLUSTER_CPUS=str(CPUS)) as cluster:
        yield SlurmMachine(cluster, nodes)


Run = Callable[[int, dict[str, Filling], Path], dict[str, Outcome]]


def on_slurm(seed: int, runs: dict[str, Filling], folder: Path) -> dict[str, Outcome]:
    machines = shared if seed % 2 == 0 else own_cluster
    return side_by_side(runs, mix_for(seed), NODES, folder, machines=machines)


def run(seed: int, fillings: dict[str, Filling], on: Run) -> dict[str, Any]:
    """What one seed came to, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        found = on(seed, {**dict.fromkeys(WITHOUT), **fillings}, Path(folder))
    alone = [found[name] for name in WITHOUT]
    lasts_s = max(job.end_s for job in alone[0].ordinary) / 60
    said: dict[str, Any] = {'seed': seed, 'load': os.getloadavg()[0]}
    # One that ran without against the two others: their own spread.
    said['without'] = {'delays_s': [round(each, 1) for each in delays_s(alone[:2], alone[2])]}
    for name in WITH:
        filled, idle = found[name], idle_of(found[name])
        delays = delays_s(alone, filled)
        said[name] = {
            'delays_s': [round(each, 1) for each in delays],
            'late': causes(alone, filled, delays),
            'idle_node_s': {key: round(value) for key, value in asdict(idle).items()},
            'commands_a_minute': {
                command: round(count / lasts_s, 1) for command, count in filled.commands.items()
            },
        }
    return said


def causes(alone: Sequence[Outcome], filled: Outcome, delays: Iterable[float]) -> list[list[Any]]:
    """Each job that is late by more than any without FreeTrain: its place, seconds, and why."""
    own_s = max(0.0, *delays_s(list(alone[:2]), alone[2]), *later_s(alone[0], alone[1]))
    told = []
    for place, delay_s in enumerate(delays):
        if delay_s <= max(own_s, 2.0):
            continue
        job, start_s = filled.jobs[place], filled.ordinary[place].start_s
        own = job.partition('_')[0]
        asked = sorted(
            at for jobs, at in filled.needs if any(j.partition('_')[0] == own for j in jobs)
        )
        could_s = min(start_s, max(each.ordinary[place].start_s for each in alone))
        if not asked:
            why = 'lacked no node of ours: those before it were late, or taken in another order'
        elif asked[0] - could_s > delay_s / 2:
            why = f'nodes were given back {asked[0] - could_s:.0f} s after it could have begun'
        else:
            why = f'nodes were given back {start_s - asked[0]:.0f} s before it began'
        told.append([place, round(delay_s, 1), why])
    return told


def table(found: Sequence[Mapping[str, Any]]) -> None:
    print(f'{len(found)} mixes: {sorted(said["seed"] for said in found)}')
    print('| run | jobs | median, s | p95 | maximum | over 30 s | idle over 60 s, trained |')
    print('|---|---|---|---|---|---|---|')
    for name in ('without', *WITH):
        delays = sorted(each for said in found for each in said[name]['delays_s'])
        idle: Counter[str] = Counter()
        for said in found:
            idle.update(said[name].get('idle_node_s', {}))
        share = f'{100 * idle["in_long"] / idle["long"]:.0f} %' if idle['long'] else ''
        print(
            f'| {name} | {len(delays)} | {median(delays):.1f} '
            f'| {delays[int(0.95 * len(delays))]:.1f} | {delays[-1]:.1f} '
            f'| {sum(each > 30 for each in delays)} | {share} |'
        )
    for name in WITH:
        asked = [sum(said[name]['commands_a_minute'].values()) for said in found]
        print(f'{name}: {median(asked):.0f} commands a minute')
        for said in found:
            for place, delay_s, why in said[name]['late']:
                print(f'  mix {said["seed"]}, job {place + 1}, {delay_s:.0f} s late: {why}')


def main(
    file: str,
    first: str = '1',
    last: str = '20',
    *,
    fillings: dict[str, Filling] = WITH,
    on: Run = on_slurm,
) -> None:
    """``on``: runs a mix in each of several ways at once."""
    out = Path(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    known = [json.loads(line) for line in out.read_text().splitlines()]
    for seed in range(int(first), int(last) + 1):
        if seed in {said['seed'] for said in known}:
            continue
        try:
            # Blocks import no torch: that would take processors from the schedulers here.
            with template.that_imports(*template.OF_RANKS):
                os.environ.update(template.for_nodes())
                known.append(run(seed, fillings, on))
        except Exception as error:  # the next time it is run again
            print(f'mix {seed} was not measured: {error!r}', file=sys.stderr, flush=True)
            continue
        with out.open('a') as lines:
            lines.write(json.dumps(known[-1]) + '\n')
        print(f'mix {seed} is done', flush=True)
    if known:
        table(known)


if __name__ == '__main__':
    main(*sys.argv[1:])

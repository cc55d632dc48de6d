"""Which mixes can show whether jobs wait: ``python -m tests.slurm.steady_mixes SEED ...``

Each mix runs eight times at once on clusters of its own, without FreeTrain. In all runs but the
first each job comes up to 2 s later and takes up to 2 s longer or shorter, and the reservation
comes up to 2 s earlier or 1 s later. Such seconds add up along a chain of jobs. Where a job's start
differs by more than that, the order of the jobs depends on seconds, and a delay says nothing about
what runs beside them.
"""

import random
import sys
import tempfile
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tests.slurm.delay import scatter_s
from tests.slurm.experiment import side_by_side
from tests.slurm.mix import Mix, Ordinary
from tests.slurm.zero_delay import NODES, mix_of

RUNS = range(8)
MOST_S = 20.0  # 2 s for each of ten jobs


def uneven(mix: Mix, number: int) -> Mix:
    """The mix with other seconds, which depend on ``number``; 0: as it is. Jobs that come together
    still do, and all come in the same order.
    """
    if not number:
        return mix
    draw = random.Random(number)
    longer = (0.0, 2.0) if number % 2 else (-2.0, 0.0)
    jobs: list[Ordinary] = []
    last_s = 0.0
    for at_s, together in groupby(mix.jobs, key=lambda job: job.at_s):
        last_s = max(last_s, at_s + draw.uniform(0.0, 2.0))
        for job in together:
            run_s = max(1.0, job.run_s + draw.uniform(*longer))
            apart_s = 2.0 if job.tasks > 1 else 0.0
            jobs.append(replace(job, at_s=last_s, run_s=run_s, apart_s=apart_s))
    reserved = mix.reserved
    if reserved is not None:
        reserved = replace(reserved, at_s=reserved.at_s + draw.choice((-2, -1, 0, 1)))
    return Mix(tuple(jobs), reserved)


def main(*seeds: str) -> None:
    """Print for each mix by how much starts differ, in seconds, and whether it is steady."""
    for seed in map(int, seeds):
        mixes = {str(number): uneven(mix_of(seed), number) for number in RUNS}
        with tempfile.TemporaryDirectory() as scratch:
            runs = side_by_side(dict.fromkeys(mixes), mixes, NODES, Path(scratch))
        first, *others = runs.values()
        apart_s = max(scatter_s(first, other) for other in others)
        steady = 'steady' if apart_s <= MOST_S else 'not steady'
        print(f'mix {seed}: {apart_s:.0f} s apart, {steady}', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])

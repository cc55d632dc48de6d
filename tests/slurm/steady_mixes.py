"""Which mixes can show whether jobs wait: ``python -m tests.slurm.steady_mixes SEED ...``

Each mix runs five times at once on clusters of its own, without FreeTrain. In all runs but the
first each job takes up to 2 s longer, and the reservation comes 1 s later, or 1 or 2 s earlier, as
if all jobs were earlier or later. Where a job's start differs by more than a delay may be, the
order of the jobs depends on a second, and a delay says nothing about what runs beside them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.delay import scatter_s
from tests.slurm.experiment import KILL_WAIT_S, Machine, SlurmMachine, side_by_side
from tests.slurm.mix import Ordinary, Reserved
from tests.slurm.zero_delay import NODES, STOP_S, mix_of
from tests.support.slurm import Cluster, running_cluster

RUNS = ('0', '1', '2', '3', '4')
RESERVED_LATER_S = (0, 1, -1, -1, -2)
MOST_S = STOP_S + KILL_WAIT_S


class UnevenMachine(SlurmMachine):
    """Jobs, and tasks of an array, take up to 2 s longer, and nodes are set aside earlier or later;
    by how much depends on ``number``, 0: not at all.
    """

    def __init__(self, cluster: Cluster, nodes: int, number: int) -> None:
        super().__init__(cluster, nodes)
        self._number = number

    def reserve(self, reserved: Reserved, at: float) -> None:
        super().reserve(reserved, at + RESERVED_LATER_S[self._number])

    def seconds(self, job: Ordinary) -> float | str:
        if not self._number:
            return job.run_s
        # A task finds the number of its own job only where it runs; sleep adds what it is given.
        return f'{job.run_s} $((SLURM_JOB_ID * {7919 * self._number} % 21))e-1'


@contextmanager
def uneven_cluster(name: str, nodes: int) -> Iterator[Machine]:
    with running_cluster(nodes) as cluster:
        yield UnevenMachine(cluster, nodes, int(name))


def main(*seeds: str) -> None:
    """Print for each mix by how much starts differ, in seconds, and whether it is steady."""
    for seed in map(int, seeds):
        with tempfile.TemporaryDirectory() as scratch:
            runs = side_by_side(
                dict.fromkeys(RUNS), mix_of(seed), NODES, Path(scratch), machines=uneven_cluster
            )
        apart_s = scatter_s(*runs.values())
        steady = 'steady' if apart_s <= MOST_S else 'not steady'
        print(f'mix {seed}: {apart_s:.0f} s apart, {steady}', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])

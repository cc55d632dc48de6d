"""How much later jobs start on a real PBS: ``python -m tests.pbs.delay_all FILE [FIRST LAST]``;
three nodes for each run, jobs within two minutes.
"""

import sys
from pathlib import Path

from tests.pbs.groups import groups
from tests.slurm.delay_all import filled, main
from tests.slurm.experiment import Filling, Outcome, side_by_side
from tests.slurm.mix import untidy

NODES = 3
WITH = filled({'queue': 'batch'}, {'queue': 'preemptable'})


def on_pbs(seed: int, runs: dict[str, Filling], folder: Path) -> dict[str, Outcome]:
    mix = untidy(seed, NODES, 10, 120.0, 40.0)
    with groups(tuple(runs), NODES) as machines:
        return side_by_side(runs, mix, NODES, folder, machines=machines)


if __name__ == '__main__':
    main(*sys.argv[1:], fillings=WITH, on=on_pbs)

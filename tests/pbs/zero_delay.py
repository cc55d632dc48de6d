"""The long form of the experiment on a real PBS: ``python -m tests.pbs.zero_delay FOLDER [SEED
...]``. Writes ``zero-delay-pbs.json``, and prints a table.
"""

import sys
from pathlib import Path

from tests.pbs.groups import MODES, groups
from tests.slurm.experiment import Filling, Outcome, side_by_side
from tests.slurm.mix import Mix
from tests.slurm.zero_delay import NODES, main


def on_pbs(runs: dict[str, Filling], mix: Mix, folder: Path) -> dict[str, Outcome]:
    with groups(tuple(runs), NODES) as machines:
        return side_by_side(runs, mix, NODES, folder, machines=machines)


if __name__ == '__main__':
    main(*sys.argv[1:], modes=MODES, run=on_pbs, name='zero-delay-pbs.json')

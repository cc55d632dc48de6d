"""Which mixes can show whether jobs wait: ``python -m tests.slurm.steady_mixes SEED ...``

Each mix runs five times at once on clusters of its own, without FreeTrain: in the second run all
jobs come 1 s later than in the first, in the others 2, 3 and 4 s. The reservation comes as if the
second were the mix. Where a job's wait differs by more than 10 s, the order of the jobs depends on
a second, and a delay says nothing about what runs beside them.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.slurm.delay import scatter_s
from tests.slurm.experiment import side_by_side
from tests.slurm.zero_delay import NODES, mix_of

LATER_S = {f'{by_s:g} s later': by_s for by_s in (0.0, 1.0, 2.0, 3.0, 4.0)}
EARLIER_S = 1.0
MOST_S = 10.0


def main(*seeds: str) -> None:
    """Print for each mix by how much starts differ, in seconds, and whether it is steady."""
    for seed in map(int, seeds):
        mix = mix_of(seed)
        assert mix.reserved is not None
        aside = replace(mix.reserved, at_s=mix.reserved.at_s + EARLIER_S)
        with tempfile.TemporaryDirectory() as scratch:
            runs = side_by_side(
                dict.fromkeys(LATER_S),
                replace(mix, reserved=aside),
                NODES,
                Path(scratch),
                later_s=LATER_S,
            )
        apart_s = scatter_s(*runs.values())
        steady = 'steady' if apart_s <= MOST_S else 'not steady'
        print(f'mix {seed}: {apart_s:.0f} s apart, {steady}', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])

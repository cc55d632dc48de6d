"""The long form of the experiment: ``python -m tests.slurm.zero_delay FOLDER``; ``make delay`` runs
it.

Writes ``zero-delay.json``, from which ``docs/zero_delay.py`` draws, and says what it found.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import Outcome, side_by_side
from tests.slurm.mix import arriving, known
from tests.slurm.test_zero_delay import BETWEEN, NODES, PREEMPTIBLE

MIXES = {
    'known': (known(104, NODES, 5, 7), BETWEEN),
    'arriving': (arriving(2, NODES, 10, 540.0, 100.0), PREEMPTIBLE),
}


def main(folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        runs = side_by_side(
            {
                f'{name}-{kind}': (mix, filling if kind == 'filled' else None)
                for name, (mix, filling) in MIXES.items()
                for kind in ('alone', 'again', 'filled')
            },
            NODES,
            Path(scratch),
        )
    found = {
        name: told(*(runs[f'{name}-{kind}'] for kind in ('alone', 'again', 'filled')))
        for name in MIXES
    }
    for name, said in found.items():
        print(
            name,
            json.dumps(
                {key: value for key, value in said.items() if key not in ('alone', 'filled')}
            ),
            flush=True,
        )
    (out / 'zero-delay.json').write_text(json.dumps(found, indent=1) + '\n')


def told(alone: Outcome, again: Outcome, filled: Outcome) -> dict[str, object]:
    """All that is drawn and said about one mix; times in seconds since the first submission."""
    idle = idle_of(filled)
    return {
        'delays_s': [round(delay, 1) for delay in delays_s([alone, again], filled)],
        'scatter_s': round(scatter_s(alone, again), 1),
        'share': round(idle.share, 3),
        'idle_node_s': {name: round(value) for name, value in asdict(idle).items()},
        'load_average': [round(value, 1) for value in os.getloadavg()],
        'cpus': os.cpu_count(),
        'alone': alone.document(),
        'filled': filled.document(),
    }


if __name__ == '__main__':
    main(*sys.argv[1:])

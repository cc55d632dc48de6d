"""Creates the files that the documentation's examples use."""

import json
from pathlib import Path

from parsl_freetrain.sites.idle_schedule import write_schedule
from parsl_freetrain.sites.synthetic_schedule import generate
from tests.support.journals import demo_journal
from tests.support.pages import all_blocks

TRAINERS = 12


def prepare(folder: Path) -> None:
    """Write a schedule, a record of idle nodes, trainers, problems, and the ledger of a run."""
    write_schedule(
        generate(nodes=6, duration_s=600, seed=1, idle_share=0.5), str(folder / 'holes.csv')
    )
    write_schedule(
        generate(nodes=64, duration_s=4 * 3600, seed=2, idle_share=0.3), str(folder / 'idle.csv')
    )
    (folder / 'trainers.json').write_text(
        json.dumps(
            [
                {
                    'name': f't{number}',
                    'min_nodes': 1,
                    'max_nodes': 8,
                    'rescale_up_s': 18,
                    'rescale_down_s': 12,
                    'total_samples': 2e6,
                    'nodes': [1, 2, 4, 8],
                    'samples_per_s': [100, 190, 350, 600],
                }
                for number in range(TRAINERS)
            ]
        )
    )
    (folder / 'study.toml').write_text(
        'idle = "idle.csv"\ntrainers = "trainers.json"\n[sweep]\nmax_trainers = [2, 4]\n'
    )
    shown = [json.loads(b.code) for b in all_blocks('json') if b.page == 'command-line.md']
    problems = [document for document in shown if 'horizon_s' in document]
    (folder / 'problems.jsonl').write_text(''.join(json.dumps(p) + '\n' for p in problems))
    second = problems[0]['trainers'][0] | {'name': 'b', 'rate': [0, 10, 19, -5, 70]}
    wrong = problems[0] | {'id': 'p7', 'trainers': [second]}
    (folder / 'slip.jsonl').write_text(f'{json.dumps(problems[0])}\n{json.dumps(wrong)}\n')
    demo_journal(folder / 'checkpoints' / 'ledger.journal')

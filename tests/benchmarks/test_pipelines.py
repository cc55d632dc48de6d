"""What a batch costs in pipelines of two stages, ours beside torch's; run by ``make bench``."""

import statistics

from tests.benchmarks.workload import MACHINE, under_torchrun

ROUNDS = 6


def test_a_batch_through_pipelines() -> None:
    found = under_torchrun(2, 'pipelines', ROUNDS)
    print(
        f'\nOne batch through two stages, CPU time of both ranks, median of {ROUNDS} '
        f'rounds in turns ({MACHINE}):'
    )
    for name, took in found['ms'].items():
        print(
            f'  {name:16} {statistics.median(took):7.1f} ms, from {min(took):.1f} to '
            f'{max(took):.1f}'
        )
    print(f'  largest difference of gradients {found["largest difference of gradients"]:.1e}')

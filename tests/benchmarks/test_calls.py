"""What the call of a trainer costs, beside that of a plain Parsl app; ``make bench``."""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from parsl import python_app

from parsl_freetrain import LocalSite, freetrain_app
from tests.benchmarks.workload import MACHINE
from tests.support.training import fit, freetrain

CALLS = 300


@python_app
def plain(number: float) -> float:
    return number


def each_ms(call: Callable[[int], Any]) -> list[float]:
    """Milliseconds of each of many calls in a row, sorted."""
    times = []
    for number in range(CALLS):
        begun = time.perf_counter()
        call(number)
        times.append(1000 * (time.perf_counter() - begun))
    return sorted(times)


def test_calls(tmp_path: Path) -> None:
    trainer = freetrain_app(max_nodes=1, total_epochs=10**6)(fit)
    with freetrain(tmp_path, LocalSite(nodes=2), max_workers_per_node=1):
        running = [trainer(pause_s=0.1), trainer(pause_s=0.1)]
        while not all(future.progress().samples for future in running):
            time.sleep(0.1)
        with suppress(OSError):  # root's alone: what else the machine does has to wait
            for thread in Path('/proc/self/task').iterdir():
                os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
        ours = each_ms(lambda number: running.append(trainer(pause_s=0.1, seed=number)))
        parsls = each_ms(plain)
        with suppress(OSError):
            for thread in Path('/proc/self/task').iterdir():
                os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
        for future in running:
            future.cancel()
    print(f'\n\n### {CALLS} calls in a row, {MACHINE}\n')
    print('| call | median, ms | least | p95 |\n|---|---|---|---|')
    for name, times in (('a trainer', ours), ('a plain Parsl app', parsls)):
        low, high = times[0], times[int(0.95 * CALLS)]
        print(f'| {name} | {statistics.median(times):.1f} | {low:.1f} | {high:.1f} |')
    print(f'\nratio of the medians: {statistics.median(ours) / statistics.median(parsls):.1f}')

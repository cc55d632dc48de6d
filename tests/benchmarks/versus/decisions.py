"""Our decisions and those of BFTrainer's published optimiser on recorded problems: ``make
decisions``; BFTRAINER_REPLAYER names its replayer (github.com/BFTrainer/Replayer).
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsl_freetrain.core.allocation.problem import Problem
from parsl_freetrain.core.allocation.problem_document import check, problem_of
from parsl_freetrain.solver import allocator_named
from tests.benchmarks.versus import bftrainer, environment
from tests.support.allocation import DECISIONS

VARIABLE = 'BFTRAINER_REPLAYER'
RECORDED = DECISIONS / 'summit-decisions.jsonl.gz'
_SAME = 1e-6  # relative; solvers stop at such a gap


@dataclass(frozen=True)
class Pair:
    """A problem's two objectives, and the CPU time of each in seconds."""

    ours: float
    theirs: float
    our_cpu_s: float
    their_cpu_s: float
    their_status: str


def table(pairs: Sequence[Pair]) -> str:
    """What the pairs come to, as Markdown."""
    lower = [p for p in pairs if p.theirs < p.ours - _SAME * abs(p.ours)]
    higher = [p for p in pairs if p.theirs > p.ours + _SAME * abs(p.ours)]
    # A decision of ours may take less than the clock of the processor shows.
    ratios = sorted(p.their_cpu_s / max(p.our_cpu_s, 1e-6) for p in pairs)
    rows = {
        'decisions': f'{len(pairs)}',
        'the same objective': f'{len(pairs) - len(lower) - len(higher)}',
        'theirs lower': f'{len(lower)}',
        'theirs higher': f'{len(higher)}',
        'theirs, worst': f'{min((p.theirs / p.ours - 1 for p in lower), default=0.0):.0%}',
        'theirs without a proof in time': f'{sum(p.their_status != "OPTIMAL" for p in pairs)}',
        'CPU time, ours, median, ms': f'{1e3 * statistics.median(p.our_cpu_s for p in pairs):.2f}',
        'CPU time, theirs, median, ms': (
            f'{1e3 * statistics.median(p.their_cpu_s for p in pairs):.1f}'
        ),
        'CPU time, theirs / ours, median': f'{statistics.median(ratios):.0f}',
        'CPU time, theirs / ours, p99': f'{ratios[int(0.99 * (len(ratios) - 1))]:.0f}',
    }
    return '| | |\n|---|---|\n' + ''.join(f'| {what} | {value} |\n' for what, value in rows.items())


def ours(problem: Problem) -> tuple[float, float]:
    """Objective and CPU time, without the process that protects us from solvers."""
    allocator = allocator_named('auto', isolated=False)  # a new one: it remembers nothing
    began = time.process_time()
    found = allocator.allocate(problem)
    return found.objective, time.process_time() - began


def theirs(folder: Path, problems: Sequence[dict[str, Any]], limit_s: float) -> list[Any]:
    words = [str(environment.PYTHON), bftrainer.__file__, str(folder), str(limit_s)]
    asked = ''.join(json.dumps(problem) + '\n' for problem in problems)
    done = subprocess.run(words, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    # CBC writes to standard output, too.
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"nodes"')]
    return [json.loads(line) for line in lines]


def replayer(given: str, into: Path) -> Path:
    """The folder that has its progMIP.py."""
    source = Path(given)
    if source.is_file():
        with tarfile.open(source) as archive:
            archive.extractall(into, filter='data')
        source = into
    return next(source.rglob('progMIP.py')).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog='make decisions', description=__doc__)
    parser.add_argument('--most', type=int, default=60, help='problems, evenly spaced')
    parser.add_argument('--limit', type=float, default=10.0, help='seconds for each of theirs')
    parser.add_argument('--recorded', type=Path, default=RECORDED)
    parser.add_argument('--out', type=Path, default=Path('demo-out/decisions.json'))
    given = parser.parse_args()
    environment.install()
    reason = environment.why_not('mip')
    if VARIABLE not in os.environ or not given.recorded.exists() or reason:
        sys.exit(
            f'{VARIABLE} must name the published replayer, {given.recorded} must have the recorded '
            f'decisions, and mip must be installed ({reason or "it is"}).'
        )
    with gzip.open(given.recorded, 'rt') as lines:
        recorded = [json.loads(line) for line in lines]
    picked = recorded[:: max(1, -(-len(recorded) // given.most))]
    problems = [problem_of(check(one)) for one in picked]
    ours(problems[0])  # which imports what it needs
    with tempfile.TemporaryDirectory() as folder:
        found = theirs(replayer(os.environ[VARIABLE], Path(folder)), picked, given.limit)
    pairs = []
    for problem, their in zip(problems, found, strict=True):
        objective, used = ours(problem)
        named = {bid.name: n for bid, n in zip(problem.bids, their['nodes'], strict=True)}
        pairs.append(
            Pair(objective, problem.objective(named), used, their['cpu_s'], their['status'])
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([vars(pair) for pair in pairs], indent=1) + '\n')
    print(table(pairs))


if __name__ == '__main__':
    main()

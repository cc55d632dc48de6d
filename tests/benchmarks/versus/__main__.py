"""``python -m tests.benchmarks.versus``: all systems in turns, and the tables of what they did."""

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.benchmarks.versus import environment
from tests.benchmarks.versus.machine import ROOT
from tests.benchmarks.versus.measures import Run, same_bits
from tests.benchmarks.versus.plan import NothingTrained, disturbed, undisturbed
from tests.benchmarks.versus.systems.ours import Ours
from tests.benchmarks.versus.systems.protocol import System
from tests.benchmarks.versus.systems.ray_train import RayTrain
from tests.benchmarks.versus.systems.restart_loop import RestartLoop
from tests.benchmarks.versus.systems.torchft import Torchft
from tests.benchmarks.versus.systems.torchrun_elastic import TorchrunElastic
from tests.benchmarks.versus.tables import Column, document, markdown, picture

SYSTEMS: dict[str, Callable[[], System]] = {
    'reproducible': lambda: Ours('reproducible'),
    'throughput': lambda: Ours('throughput'),
    'ahead': lambda: Ours('throughput', ahead=True),
    'loop': RestartLoop,
    'torchrun': TorchrunElastic,
    'ray': RayTrain,
    'torchft': Torchft,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='make versus', description=__doc__)
    add = parser.add_argument
    add('--rounds', type=int, default=3, help='default: 3')
    add('--systems', default=','.join(SYSTEMS), help='some of %(default)s')
    add('--gap', type=float, default=10.0, help='seconds between two events, at least')
    add('--limit', type=float, default=90.0, help='seconds to wait for a training to go on')
    add('--out', type=Path, default=Path('demo-out/versus'))
    add('--docs', action='store_true', help='write docs/evidence/versus.md, too')
    add('--install', action='store_true', help='make .venv-versus, and no more')
    given = parser.parse_args()
    strange = set(given.systems.split(',')) - SYSTEMS.keys()
    if strange:
        parser.error(f'--systems: {", ".join(sorted(strange))} is none of {", ".join(SYSTEMS)}')
    return given


def main() -> None:
    given = arguments()
    environment.install()
    if given.install:
        return
    # SIGTERM ends it as Ctrl-C does: with no process left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended by SIGTERM'))
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.systems.split(',')
    columns = {name: Column(SYSTEMS[name]().name) for name in names}
    facts = {
        'command': 'make versus VERSUS_ARGS=' + repr(' '.join(sys.argv[1:])),
        'machine': f'{os.cpu_count()} cores, {platform.machine()}, Python '
        f'{platform.python_version()}, torch {torch.__version__}',
        'date': time.strftime('%Y-%m-%d', time.gmtime()),
        'load_at_begin': os.getloadavg()[0],
        'rounds': given.rounds,
        'gap_s': given.gap,
    }
    # Sockets have short paths, and the paths of a checkout may be long.
    with tempfile.TemporaryDirectory(prefix='versus-') as folder:
        for turn in range(given.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                print(f'round {turn + 1}: {columns[name].name}', flush=True)
                one_turn(name, columns[name], Path(folder) / f'{name}-{turn}', given, turn == 0)
                write(list(columns.values()), facts, given)
    print(markdown(list(columns.values())))


def one_turn(
    name: str, column: Column, folder: Path, given: argparse.Namespace, first: bool
) -> None:
    """A turn of a system, with its undisturbed run in the first round."""
    reason = environment.why_not(SYSTEMS[name]().needs)
    if reason:
        column.not_measured = f'not installed: {reason}'
        return
    try:
        run, with_block = disturbed(SYSTEMS[name](), folder, given.gap, given.limit)
    except NothingTrained as error:
        kept = given.out / f'{folder.name}.logs'
        shutil.copytree(folder, kept, dirs_exist_ok=True, ignore=_but_logs)
        column.not_measured = str(error).replace(str(folder), str(kept))
        return
    column.add(run, with_block)
    if first:
        compare(name, column, run, folder, given)
    shutil.rmtree(folder, ignore_errors=True)


def compare(name: str, column: Column, run: Run, folder: Path, given: argparse.Namespace) -> None:
    length = run.ended - run.commanded
    steps = undisturbed(SYSTEMS[name](), folder.with_suffix('.plain'), run, given.limit + length)
    column.bits(same_bits(run.steps, steps))


def _but_logs(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if not (n.endswith('.log') or os.path.isdir(os.path.join(folder, n)))]


def write(columns: list[Column], facts: dict[str, object], given: argparse.Namespace) -> None:
    """After each turn, so that nothing is lost when it is interrupted."""
    (given.out / 'versus.json').write_text(json.dumps(document(columns, facts), indent=1) + '\n')
    (given.out / 'versus.md').write_text(markdown(columns))
    picture(columns, given.out / 'versus.png')
    if given.docs:
        (ROOT / 'docs' / 'versus.json').write_text((given.out / 'versus.json').read_text())
        (ROOT / 'docs' / 'evidence' / 'versus.md').write_text(page(columns, facts))


def page(columns: list[Column], facts: dict[str, object]) -> str:
    """docs/evidence/versus.md. ``python docs/pictures.py`` draws its picture."""
    words = (
        f'`{facts["command"]}` made this table on {facts["date"]} ({facts["machine"]}; load '
        f'average at the beginning {facts["load_at_begin"]:.1f}). Medians, with their ranges; '
        f'rounds: {facts["rounds"]}.'
    )
    return (
        '# Other systems under the same kills\n\n'
        f'{textwrap.fill(words, 100, break_long_words=False)}\n\n{markdown(columns)}\n'
        '![The same figures as bars](../_static/versus.png)\n'
    )


if __name__ == '__main__':
    main()

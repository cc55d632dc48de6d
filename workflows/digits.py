"""The main demonstration: two trainers on handwritten digits, in the holes of one site.

``python -m workflows.digits`` trains a small CNN and an MLP on slots that join, leave and are
killed according to a schedule of holes. Then it trains the same two networks undisturbed, and
compares the final weights bit by bit. With ``--site`` the holes are those of a machine with a batch
scheduler.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import parsl
import torch
from parsl.config import Config
from rich.console import Console
from torch import Tensor

from parsl_freetrain import (
    BackfillProvider,
    BadInput,
    Checkpoint,
    Checkpoints,
    FreeTrainError,
    FreeTrainExecutor,
    LocalSite,
    Policy,
    Reproducible,
    TrainingFuture,
    freetrain_app,
    same_weights,
)
from parsl_freetrain.cli.live.view import ClosingTable
from parsl_freetrain.cli.sites import provider_of
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.host import files
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.figures import Figures
from parsl_freetrain.report.page import report_page
from parsl_freetrain.report.summary import summary
from parsl_freetrain.sites.idle_schedule import Schedule, read_schedule, write_schedule
from parsl_freetrain.sites.synthetic_schedule import generate
from workflows.command import add_site_option, output_folder, result, set_aside
from workflows.digits_models import train_digits
from workflows.live_view import run_live

NETWORKS = ('cnn', 'mlp')
SHARDS = 4

LONGER = 'the same command continues, with --idle for a longer schedule'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    options = parse(arguments)
    console = Console()
    out = Path(options.out).absolute()
    try:
        output_folder(out)
        if options.resume == 'never' or (
            options.resume == 'auto' and (out / 'summary.json').exists()
        ):
            set_aside(out)
        console.rule(f'in the holes of {where(options)}')
        in_holes = train(
            out / 'holes',
            holes(out, options),
            options,
            console,
            max_nodes=SHARDS,
            step_s=options.step_s,
        )
        console.rule('undisturbed, each on one node')
        alone = train(
            out / 'undisturbed',
            BackfillProvider(LocalSite(nodes=len(NETWORKS), poll_s=0.25), min_hole_s=1.0),
            options,
            console,
            max_nodes=1,
        )
        report(out, in_holes, alone, options, console)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f'Stopped. Nothing is lost: the same command continues with the checkpoints in {out}.',
            file=sys.stderr,
        )
        return 130
    except FreeTrainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='digits', description=(__doc__ or '').partition('\n')[0])
    add_site_option(parser)
    parser.add_argument(
        '--idle',
        metavar='FILE',
        help='schedule of holes, CSV: start_s,end_s,node (default: a generated one)',
    )
    parser.add_argument(
        '--time-factor',
        type=float,
        default=1.0,
        help='multiply the times of FILE by this (default: 1)',
    )
    parser.add_argument(
        '--nodes', type=int, default=6, help='slots of this computer to use as nodes (default: 6)'
    )
    parser.add_argument(
        '--seed', type=int, default=32, help='of the generated schedule (default: %(default)s)'
    )
    parser.add_argument(
        '--epochs',
        type=float,
        default=180,
        help='how often each trainer sees every image (default: %(default)s)',
    )
    parser.add_argument(
        '--step-s',
        type=float,
        default=0.0,
        help='seconds added to each step in the holes (default: 0)',
    )
    parser.add_argument(
        '--resume',
        choices=('auto', 'require', 'never'),
        default='auto',
        help=(
            'what an interrupted run left in the output folder is continued (auto), must '
            'be there (require), or is moved aside (never)'
        ),
    )
    parser.add_argument('--out', default='demo-out', help='output folder (default: %(default)s)')
    return parser.parse_args(arguments)


def where(options: argparse.Namespace) -> str:
    return options.site or f'{options.nodes} nodes of this computer'


def holes(out: Path, options: argparse.Namespace) -> BackfillProvider:
    """The site that the options name.

    Raises
    ------
    BadInput
        There is no such site, or its file or the schedule is invalid.
    """
    if options.site:
        return provider_of(options.site)
    schedule = read_schedule(options.idle) if options.idle else generated(out, options)
    site = LocalSite(
        nodes=options.nodes,
        schedule=schedule,
        time_factor=options.time_factor if options.idle else 1.0,
        taken='kill',
        poll_s=0.25,
    )
    return BackfillProvider(site=site, min_hole_s=1.0)


def generated(out: Path, options: argparse.Namespace) -> Schedule:
    """A schedule that resembles the idle nodes of a supercomputer; it is saved in the output
    folder.
    """
    schedule = generate(
        options.nodes, duration_s=1800, seed=options.seed, idle_share=0.7, time_factor=1 / 60
    )
    write_schedule(schedule, out / 'holes.csv')
    return schedule


def train(
    folder: Path,
    provider: BackfillProvider,
    options: argparse.Namespace,
    console: Console,
    max_nodes: int,
    step_s: float = 0.0,
) -> dict[str, Checkpoint]:
    """Train both networks and return their final checkpoints."""
    executor = FreeTrainExecutor(
        provider=provider,
        checkpoint_dir=str(folder),
        resume=options.resume if folder.name == 'holes' else 'auto',
        policy=Policy(metric='speedup', horizon_s=20),
        max_workers_per_node=0,
    )
    trainer = freetrain_app(
        min_nodes=1,
        max_nodes=max_nodes,
        total_epochs=options.epochs,
        mode=Reproducible(shards=SHARDS),
        checkpoints=Checkpoints(every_s=1.0),
    )(train_digits)
    data = digits()
    with (
        live(executor.ledger_path, console),
        parsl.load(Config(executors=[executor], run_dir=str(folder / 'runinfo'))),
    ):
        futures: dict[str, TrainingFuture] = {
            name: trainer(name, *data, step_s=step_s, trainer_name=name) for name in NETWORKS
        }
        return {name: result(future, provider.site, LONGER) for name, future in futures.items()}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (1437, 1, 8, 8) and labels, test images (360, 1, 8, 8) and labels."""
    # The file in scikit-learn; to import all of the library takes as long as to import torch.
    file = distribution('scikit-learn').locate_file('sklearn/datasets/data/digits.csv.gz')
    table = torch.from_numpy(np.loadtxt(str(file), delimiter=','))
    images = table[:, :-1].float().unflatten(1, (1, 8, 8)) / 16
    labels = table[:, -1].long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, training = order[:360], order[360:]
    return images[training], labels[training], images[test], labels[test]


@contextmanager
def live(ledger: Path, console: Console) -> Iterator[None]:
    """Show progress until the block ends."""
    stop = threading.Event()
    view = threading.Thread(
        target=run_live, args=(ledger, stop, console, MilpAllocator()), name='live-view'
    )
    view.start()
    try:
        yield
    finally:
        stop.set()
        view.join()


def report(
    out: Path,
    in_holes: dict[str, Checkpoint],
    alone: dict[str, Checkpoint],
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Compare the weights, write summary.json and report.html, print the closing table."""
    history = Journal(out / 'holes' / 'ledger.journal').history()
    result: dict[str, Any] = summary(history)
    for name in NETWORKS:
        result['trainers'][name].update(
            accuracy=in_holes[name].metrics['accuracy'],
            accuracy_undisturbed=alone[name].metrics['accuracy'],
            weights_equal=same_weights(in_holes[name], alone[name]),
        )
    page = report_page(Figures(history, time.time(), DpAllocator()))
    files.replace(out / 'report.html', page.encode())
    (out / 'summary.json').write_text(json.dumps(result, indent=2) + '\n')
    console.print(ClosingTable(result))
    console.print(f'Report: {out / "report.html"}', soft_wrap=True)
    console.print(f'Summary: {out / "summary.json"}', soft_wrap=True)


if __name__ == '__main__':
    logging.getLogger('parsl').setLevel(logging.WARNING)
    sys.exit(main())

"""Trains one network on nodes that join, leave and are killed, and again on one node; shared by
cosmoflow, unet3d, chimera_gpt and ffn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import parsl
from parsl.config import Config

from parsl_freetrain import (
    BackfillProvider,
    BadInput,
    Checkpoint,
    Checkpoints,
    FreeTrainError,
    FreeTrainExecutor,
    LocalSite,
    Policy,
    Scaling,
    Shape,
    Throughput,
    TrainingFuture,
    freetrain_app,
)
from parsl_freetrain.cli.sites import provider_of
from parsl_freetrain.executor.requests import Preempt, ask
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary
from parsl_freetrain.sites.protocols import Site
from parsl_freetrain.sites.synthetic_schedule import generate
from workflows.command import add_site_option, output_folder, refuse_to_wait, result, set_aside

DIVIDED, WHOLE = 'divided', 'whole'
SHAPES = {1: Shape(), 2: Shape(spatial=(2, 1, 1)), 4: Shape(data=2, spatial=(2, 1, 1))}
SCALING = {1: 1.0, 2: 1.8, 4: 3.2}  # assumed for a machine with one core per node
STRUCK_AT = (0.15, 0.3)
"""Shares of the training at which all ranks of the divided trainer are killed."""
LONGER = '--steady has holes without end'


def main_of(
    name: str,
    run: Callable[[Path, argparse.Namespace], None],
    arguments: Sequence[str] | None,
    more: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> int:
    """Parse the options (``more`` adds some), run, and print errors as one sentence; returns the
    exit status.
    """
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument(
        '--small',
        action='store_true',
        help='a small training, here on two slots that are always idle: under a minute',
    )
    add_site_option(parser)
    parser.add_argument(
        '--steady',
        action='store_true',
        help='nodes are always idle, in place of a schedule of holes',
    )
    parser.add_argument(
        '--seed', type=int, default=5, help='of the schedule of holes (default: %(default)s)'
    )
    parser.add_argument(
        '--out',
        default=f'demo-out/{name}',
        help='output folder; what is in it is moved aside (default: %(default)s)',
    )
    more(parser)
    options = parser.parse_args(arguments)
    out = Path(options.out).absolute()
    try:
        options.provider = provider_of(options.site) if options.site else here(options)
        output_folder(out)
        set_aside(out)
        run(out, options)
    except FreeTrainError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    return 0


def train(
    function: Callable[..., None],
    settings: dict[str, Any],
    samples: int,
    out: Path,
    options: argparse.Namespace,
    shapes: Mapping[int, Shape] = SHAPES,
    scaling: dict[int, float] = SCALING,
    **settings_of_both: Any,
) -> dict[str, Checkpoint]:
    """The final checkpoints of both trainers.

    The divided trainer is killed on the way. It has all available nodes until half time (in a small
    training: until it trains again after the last kill); then the undivided trainer is submitted
    and gets one node, so the divided one continues in another shape.

    Parameters
    ----------
    function
        Takes the context and ``settings``; at its end it writes its loss curve into
        ``out/TRAINER-losses.json``.
    samples
        Number of samples that each trainer trains.
    shapes, scaling
        Of the divided trainer, by node count.
    **settings_of_both
        Arguments of freetrain_app for both. Default: ``mode=Throughput()``, which a division in
        space or in stages needs.
    """
    site = options.provider.site
    executor = FreeTrainExecutor(
        provider=options.provider,
        checkpoint_dir=str(out / 'checkpoints'),
        policy=Policy(metric='speedup', horizon_s=60),
        max_workers_per_node=0,
    )
    if isinstance(site, LocalSite):
        shapes = {nodes: shape for nodes, shape in shapes.items() if nodes <= len(site.names)}

    def submitted(name: str, shapes: Mapping[int, Shape]) -> TrainingFuture:
        app = freetrain_app(
            sizes=dict(shapes),
            total_samples=samples,
            scaling=Scaling(rate=scaling, rescale_up_s=0.5, rescale_down_s=0.5),
            checkpoints=Checkpoints(every_s=1.0),
            **{'mode': Throughput(), **settings_of_both},
        )(function)
        return app(**settings, trainer_name=name)

    with parsl.load(Config(executors=[executor], run_dir=str(out / 'runinfo'))):
        divided = submitted(DIVIDED, shapes)
        for share in STRUCK_AT:
            until(divided, share * samples, site)
            strike(divided, Path(executor.ledger_path), site)
        # The second half of a small training may last no longer than a submission on a busy disk.
        until(divided, (STRUCK_AT[-1] if options.small else 0.5) * samples, site)
        whole = submitted(WHOLE, {1: Shape()})
        found = {
            name: result(future, site, LONGER)
            for name, future in ((DIVIDED, divided), (WHOLE, whole))
        }
    history = Journal(executor.ledger_path).history()
    told = summary(history)['trainers']
    nodes = [len(fragment.nodes) for fragment in history.fragments if fragment.trainer == DIVIDED]
    told[DIVIDED]['shapes'] = [str(shapes[count]) for count in nodes]
    (out / 'summary.json').write_text(json.dumps(told, indent=2) + '\n')
    print(
        f'divided: {told[DIVIDED]["fragments"]} fragments on '
        f'{", ".join(map(str, nodes))} nodes, {told[DIVIDED]["preempted"]} preempted'
    )
    return found


def here(options: argparse.Namespace) -> BackfillProvider:
    """The site of this computer's slots."""
    steady = options.small or options.steady
    schedule = (
        None
        if steady
        else generate(4, duration_s=7200, seed=options.seed, idle_share=0.8, time_factor=1 / 60)
    )
    return BackfillProvider(
        LocalSite(nodes=2 if options.small else 4, schedule=schedule, poll_s=0.25), min_hole_s=1.0
    )


def until(future: TrainingFuture, samples: float, site: Site) -> None:
    """Wait until a trainer runs and has trained a number of samples, or is done."""
    while not future.done() and not (
        future.state == 'running' and future.progress().samples >= samples
    ):
        refuse_to_wait(future, site, LONGER)
        time.sleep(0.05)


def strike(future: TrainingFuture, ledger: Path, site: Site) -> None:
    """Kill all ranks of a trainer, like ``freetrain preempt``; waits until it runs, and then until
    its next fragment begins: before that, what the killed one had trained still counts as progress.
    """
    struck: int | None = None  # number of fragments so far
    while not future.done() and struck is None:
        refuse_to_wait(future, site, LONGER)
        fragments = future.progress().fragments
        try:
            print(ask(ledger, Preempt(future.name), 30), flush=True)
        except BadInput:  # between two fragments
            time.sleep(0.1)
        else:
            struck = fragments
    while struck is not None and not future.done() and future.progress().fragments <= struck:
        refuse_to_wait(future, site, LONGER)
        time.sleep(0.05)


def losses(out: Path) -> dict[str, list[tuple[float, ...]]]:
    """By trainer: samples and loss."""
    return {
        name: json.loads((out / f'{name}-losses.json').read_text()) for name in (DIVIDED, WHOLE)
    }


def draw_losses(axis: Any, curves: dict[str, list[tuple[float, ...]]]) -> None:
    """Both loss curves in a matplotlib axis."""
    for (name, curve), style in zip(curves.items(), ('-', '--'), strict=True):
        axis.plot(*zip(*curve, strict=True), style, label=name, linewidth=1)
    axis.set(xlabel='samples', ylabel='loss', yscale='log')
    axis.legend(fontsize=8)

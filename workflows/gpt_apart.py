"""A small GPT that replicas train apart, in rounds of independent pieces (DiLoCo); it learns
Python's own manual, letter by letter.

``python -m workflows.gpt_apart`` trains four replicas on one to three nodes of this computer that
come and go, with ranks killed in a piece, while its end is committed, and in outer steps. Then it
trains the same on one node, undisturbed, and compares the weights to the last bit; and one
replica, which exchanges nothing less often, on the same samples.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import parsl
from parsl.config import Config

from parsl_freetrain import (
    BackfillProvider,
    BadInput,
    Checkpoint,
    Checkpoints,
    DiLoCo,
    FreeTrainError,
    FreeTrainExecutor,
    LocalSite,
    Nesterov,
    Reproducible,
    freetrain_app,
    same_weights,
)
from parsl_freetrain.cli.sites import provider_of
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary
from parsl_freetrain.sites.synthetic_schedule import generate
from parsl_freetrain.testing import Fault, kill_at, with_faults
from workflows.command import add_site_option, output_folder, result, set_aside
from workflows.gpt_apart_model import train_gpt

ADVICE = 'run it again with another --seed'


def struck(steps: int) -> Callable[..., Any]:
    """The function with kills of rank 0 at every stage of a round: by fragment of a replica."""

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return with_faults(
        train_gpt,
        kill_at(0, steps // 2, fragment=1),
        Fault(0, 2, strike, stage='before-commit'),
        Fault(0, 4, strike, stage='outer-before-commit', checkpoint=0),
        Fault(0, 6, strike, stage='outer-committed', checkpoint=0),
    )


def train(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train all three; returns the summary."""
    given = (32, 2, 32, 16) if options.small else (64, 3, 64, 32)  # as of train_gpt
    replicas, rounds, steps, batch_size = options.replicas, options.rounds, options.steps, given[-1]
    mode = DiLoCo(
        replicas=replicas,
        steps=steps,
        outer=None if options.mean else Nesterov(lr=options.outer_lr),
        inner=Reproducible(shards=2, seed=options.seed),
    )

    def run(name: str, provider: BackfillProvider, function: Any, **how: Any) -> Checkpoint:
        executor = FreeTrainExecutor(
            provider=provider,
            checkpoint_dir=str(out / name / 'checkpoints'),
            max_workers_per_node=0,
        )
        app = freetrain_app(
            max_nodes=2,
            total_samples=rounds * steps * batch_size,
            checkpoints=Checkpoints(every_s=1.0),
            **how,
        )(function)
        with parsl.load(Config(executors=[executor], run_dir=str(out / name / 'runinfo'))):
            return result(app(*given, trainer_name='gpt'), provider.site, ADVICE)

    def calm() -> BackfillProvider:
        return BackfillProvider(LocalSite(nodes=1, poll_s=0.25), min_hole_s=1.0)

    alone = run('alone', calm(), train_gpt, mode=mode)
    together = run('synchronous', calm(), train_gpt, mode=mode.inner)
    found = {'rounds': rounds, 'pieces': rounds * replicas, 'loss': alone.result['loss']}
    found['loss_synchronous'] = together.result['loss']
    if options.calm:
        return found
    apart = run('apart', options.provider, struck(steps), mode=mode)
    told = summary(Journal(out / 'apart' / 'checkpoints' / 'ledger.journal').history())
    row = told['trainers']['gpt']
    return {
        'weights_equal': same_weights(apart, alone),
        **found,
        'kills': row['preempted'],
        'fragments': row['fragments'],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow; returns the exit status."""
    parser = argparse.ArgumentParser(prog='gpt_apart', description=__doc__)
    parser.add_argument('--small', action='store_true', help='a small network: about a minute')
    add_site_option(parser)
    parser.add_argument('--replicas', type=int, default=4, help='default: %(default)s')
    parser.add_argument('--steps', type=int, help='of a round; default: 50, small: 5')
    parser.add_argument('--rounds', type=int, help='default: 10, small: 3')
    parser.add_argument('--calm', action='store_true', help='undisturbed only, for the losses')
    parser.add_argument('--mean', action='store_true', help='without an outer optimizer')
    parser.add_argument('--outer-lr', type=float, default=0.7, help='default: %(default)s')
    parser.add_argument('--seed', type=int, default=5, help='default: %(default)s')
    parser.add_argument('--out', default='demo-out/gpt_apart', help='default: %(default)s')
    options = parser.parse_args(arguments)
    options.steps = options.steps or (5 if options.small else 50)
    options.rounds = options.rounds or (3 if options.small else 10)
    out = Path(options.out).absolute()
    try:
        holes = generate(3, duration_s=3600, seed=options.seed, idle_share=0.7, time_factor=1 / 60)
        options.provider = (
            provider_of(options.site)
            if options.site
            else BackfillProvider(LocalSite(nodes=3, schedule=holes, poll_s=0.25), min_hole_s=1.0)
        )
        output_folder(out)
        set_aside(out)
        found = train(out, options)
    except FreeTrainError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    (out / 'summary.json').write_text(json.dumps(found, indent=2) + '\n')
    print(json.dumps(found, indent=2))
    return 0


if __name__ == '__main__':
    sys.exit(main())

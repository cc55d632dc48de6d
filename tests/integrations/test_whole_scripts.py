"""The scripts of docs/your-script.md in one executor; ranks and all nodes are killed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain import Checkpoints, FragmentContext, LocalSite, Reproducible, freetrain_app
from parsl_freetrain.training.checkpoint.export import load_weights
from tests.support import template
from tests.support.examples import equal, example, in_this_process
from tests.support.processes import Started, victims
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until

SCRIPTS = ('transformers', 'lightning', 'images')


def struck(function: Callable[..., Any], folder: Path) -> Callable[[FragmentContext], Any]:
    """A rank of its first fragment is killed; the second one waits for a file ``go``."""

    def train(ctx: FragmentContext) -> Any:
        def after_step() -> None:
            # In a file, since variables of the function go on with the next fragment.
            with (folder / f'{ctx.trainer} {ctx.fragment} {ctx.rank}').open('ab') as done:
                done.write(b'.')
                steps = done.tell()
            if (ctx.fragment, ctx.rank, steps) == (1, 1, 5):
                os.kill(os.getpid(), signal.SIGKILL)
            while (ctx.fragment, steps) == (2, 4) and not (folder / 'go').exists():
                (folder / f'{ctx.trainer} waits').touch()
                time.sleep(0.02)

        ctx.after_step(after_step)
        os.chdir(folder)  # some make their output folder where they run
        return function(ctx)

    return train


@pytest.mark.long
def test_killed_ranks_and_nodes_do_not_change_what_whole_scripts_train(run_dir: Path) -> None:
    for library in ('transformers', 'lightning'):
        pytest.importorskip(library, reason=f'needs the extra {library}')
    apps = {name: example(f'{name}_freetrain').train for name in SCRIPTS}
    started = Started()
    futures: dict[str, Any] = {}
    with (
        template.that_imports(*template.OF_RANKS, 'transformers.trainer', 'lightning.pytorch'),
        freetrain(run_dir, LocalSite(nodes=6, poll_s=0.2), hang_s=LIMIT_S),
    ):
        for name, app in apps.items():
            futures[name] = freetrain_app(
                min_nodes=2,
                max_nodes=2,
                total_epochs=app.spec.total_epochs,
                mode=Reproducible(shards=4, seed=7),
                checkpoints=Checkpoints(every_s=0.05),
            )(struck(app.function, run_dir))(trainer_name=name)

        def all_wait() -> bool:
            for future in futures.values():
                if future.done():
                    future.result()  # says why
            return all((run_dir / f'{name} waits').exists() for name in SCRIPTS)

        wait_until(all_wait, 'not all go on after a kill')
        for node in victims('manager', started.processes()):
            node.kill()
        (run_dir / 'go').touch()
        found = {name: future.result(LIMIT_S) for name, future in futures.items()}
    for name, app in apps.items():
        assert futures[name].progress().fragments >= 3
        alone, weights = in_this_process(app.function, total_epochs=app.spec.total_epochs)
        assert (alone.samples, alone.metrics) == (found[name].samples, found[name].metrics)
        if name != 'transformers':  # whose result has speeds
            assert alone.result == found[name].result
        kept = load_weights(found[name].path)
        if name == 'images':  # with an average
            kept = {n.removeprefix('model.'): w for n, w in kept.items() if n[:4] != 'ema.'}
        assert equal(weights, kept)

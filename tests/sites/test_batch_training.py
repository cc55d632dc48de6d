"""The training of ``make demo``, shortened, on a real PBS that takes blocks, crashes, is silent."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import parsl_freetrain as ft
from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.sites.protocols import Site
from tests.sites.batch_blocks import QUICK
from tests.support.held import held_until
from tests.support.openpbs import ADDRESS, PbsCluster
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until
from workflows.digits import NETWORKS, SHARDS, digits

EPOCHS = 2
RUN = 'a $HOME & more'


def train(
    folder: Path,
    site: Site,
    max_nodes: int,
    disturb: Callable[[dict[str, ft.TrainingFuture]], None],
    address: str = '127.0.0.1',
) -> list[ft.Checkpoint]:
    """The final checkpoints; the trainings cannot end before ``disturb`` has."""
    folder.mkdir(exist_ok=True)
    go = folder / 'go'
    trainer = ft.freetrain_app(
        min_nodes=1,
        max_nodes=max_nodes,
        total_epochs=EPOCHS,
        scaling=ft.Scaling(
            rate={1: 1.0, 2: 1.9, 3: 2.0, 4: 3.4}, rescale_up_s=1.0, rescale_down_s=1.0
        ),
        mode=ft.Reproducible(shards=SHARDS),
        checkpoints=ft.Checkpoints(every_s=1.0),
    )(held_until(go))
    data = digits()
    with freetrain(folder, site, metric='speedup', address=address):
        futures: dict[str, ft.TrainingFuture] = {
            name: trainer(name, *data, trainer_name=name) for name in NETWORKS
        }
        disturb(futures)
        go.touch()
        return [future.result(LIMIT_S) for future in futures.values()]


def further(futures: dict[str, ft.TrainingFuture]) -> None:
    """Wait until a trainer has trained two further batches."""
    before = {name: future.progress().samples for name, future in futures.items()}
    wait_until(
        lambda: any(
            future.done() or future.progress().samples >= before[name] + 64
            for name, future in futures.items()
        )
    )


@pytest.mark.long
@pytest.mark.pbs
def test_on_a_real_pbs(openpbs: PbsCluster, tmp_path: Path) -> None:
    """Its nodes are preempted, one of them crashes, and its server hangs and starts again."""
    ledger_path = tmp_path / RUN / 'checkpoints' / 'ledger.journal'

    def history() -> History:
        with Journal(ledger_path) as ledger:
            return ledger.history()

    def disturb(futures: dict[str, ft.TrainingFuture]) -> None:
        further(futures)
        other = openpbs.submit(4, seconds=1)
        openpbs.wait(lambda: openpbs.state(other) == 'F')
        further(futures)
        held = {node.node for node in history().nodes if node.left_at is None}
        with openpbs.silent():
            further(futures)
        with openpbs.down():
            further(futures)
            further(futures)
        assert not any(n.how in ('taken', 'lost') for n in history().nodes if n.node in held)
        node = next(node.name for node in reversed(history().nodes) if node.left_at is None)
        with openpbs.crashed(node):
            further(futures)

    with openpbs.templates() as use_template:
        site = ft.PbsSite(
            queue='preemptable',
            mode='preemptible',
            worker_init=f'export PATH={Path(sys.executable).parent}:$PATH; {use_template}',
            **{**QUICK, 'command_s': 2.0, 'longest_backoff_s': 1.0, 'unreachable_s': 1.0},
        )
        found = train(tmp_path / RUN, site, SHARDS, disturb, ADDRESS)
    here = ft.LocalSite(len(NETWORKS), poll_s=0.25)
    undisturbed = train(tmp_path / 'undisturbed', here, 1, lambda _: None)
    assert all(ft.same_weights(one, other) for one, other in zip(found, undisturbed, strict=True))
    assert len(history().fragments) > len(NETWORKS)
    assert all(node.name.startswith('node0') for node in history().nodes)
    assert {'taken', 'lost'} <= {node.how for node in history().nodes}

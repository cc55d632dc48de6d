"""The training of ``make demo``, shortened, on a real PBS and on a Cobalt in a folder: blocks taken
away, a node that crashes, a scheduler that is silent, the same weights.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parsl_freetrain import (
    Checkpoint,
    Checkpoints,
    CobaltSite,
    LocalSite,
    PbsSite,
    Reproducible,
    Scaling,
    TrainingFuture,
    freetrain_app,
    same_weights,
)
from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.sites.protocols import Site
from tests.sites.batch_blocks import QUICK
from tests.support.batch_tests import Rehearsal
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
    disturb: Callable[[dict[str, TrainingFuture]], None],
    address: str = '127.0.0.1',
) -> list[Checkpoint]:
    """The final checkpoints; the trainings cannot end before ``disturb`` has."""
    go = folder / 'go'
    trainer = freetrain_app(
        min_nodes=1,
        max_nodes=max_nodes,
        total_epochs=EPOCHS,
        scaling=Scaling(
            rate={1: 1.0, 2: 1.9, 3: 2.0, 4: 3.4}, rescale_up_s=1.0, rescale_down_s=1.0
        ),
        mode=Reproducible(shards=SHARDS),
        checkpoints=Checkpoints(every_s=1.0),
    )(held_until(go))
    data = digits()
    with freetrain(folder, site, metric='speedup', address=address):
        futures: dict[str, TrainingFuture] = {
            name: trainer(name, *data, trainer_name=name) for name in NETWORKS
        }
        disturb(futures)
        go.touch()
        return [future.result(LIMIT_S) for future in futures.values()]


def further(futures: dict[str, TrainingFuture]) -> None:
    """Wait until a trainer has trained two further batches."""
    before = {name: future.progress().samples for name, future in futures.items()}
    wait_until(
        lambda: any(
            future.done() or future.progress().samples >= before[name] + 64
            for name, future in futures.items()
        )
    )


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    return train(
        tmp_path_factory.mktemp('undisturbed'),
        LocalSite(len(NETWORKS), poll_s=0.25),
        1,
        lambda _: None,
    )


def judge(folder: Path, found: list[Checkpoint], undisturbed: list[Checkpoint]) -> None:
    assert all(same_weights(one, other) for one, other in zip(found, undisturbed, strict=True))
    with Journal(folder / 'checkpoints' / 'ledger.journal') as ledger:
        history = ledger.history()
    assert len(history.fragments) > len(NETWORKS)
    assert all(node.name.startswith(('node0', 'nid000')) for node in history.nodes)


@pytest.mark.long
@pytest.mark.pbs
def test_on_a_real_pbs(openpbs: PbsCluster, tmp_path: Path, undisturbed: list[Checkpoint]) -> None:
    """Its nodes are preempted, one of them crashes, and its server hangs and starts again."""
    ledger_path = tmp_path / RUN / 'checkpoints' / 'ledger.journal'

    def history() -> History:
        with Journal(ledger_path) as ledger:
            return ledger.history()

    def disturb(futures: dict[str, TrainingFuture]) -> None:
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
        site = PbsSite(
            queue='preemptable',
            mode='preemptible',
            worker_init=f'export PATH={Path(sys.executable).parent}:$PATH; {use_template}',
            **{**QUICK, 'command_s': 2.0, 'longest_backoff_s': 1.0, 'unreachable_s': 1.0},
        )
        found = train(tmp_path / RUN, site, SHARDS, disturb, ADDRESS)
    judge(tmp_path / RUN, found, undisturbed)
    assert {'taken', 'lost'} <= {node.how for node in history().nodes}


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_in_the_backfill_windows_of_cobalt(
    cobalt: Rehearsal, tmp_path: Path, undisturbed: list[Checkpoint]
) -> None:
    def disturb(futures: dict[str, TrainingFuture]) -> None:
        further(futures)
        cobalt.finish(cobalt.running()[-1], 'deleted')  # an administrator needs the nodes
        cobalt.others(2, walltime_s=120, seconds=5)

    cobalt.others(1, walltime_s=600, seconds=600)
    cobalt.others(4, walltime_s=600)  # three nodes are drained for it
    folder = tmp_path / 'run'
    judge(folder, train(folder, CobaltSite(queue='batch', **QUICK), SHARDS, disturb), undisturbed)

"""The main job on a real cluster whose nodes and scheduler go away: the same weights."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.read import Journal
from tests.support import template
from tests.support.programs import Program
from tests.support.slurm import Cluster
from tests.support.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long]

STORM = 'STORM' in os.environ  # as `make storm` sets it: longer
SILENT_S = 60.0 if STORM else 10.0  # how long the scheduler does not answer
BLOCKS = 10 if STORM else 6
EPOCHS = 8
SITE = """
partition = 'scavenger'
mode = 'preemptible'
poll_s = 0.5
submit_every_s = 0.0
start_s = 3.0
ending_s = 3.0
command_s = 3.0
unreachable_s = 5.0
longest_backoff_s = 2.0
"""


class Run:
    """``python -m workflows.digits --site FILE`` in a process, held up until it may end."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], output: Path) -> None:
        self.process = process
        self._go = folder / 'go'
        self._ledger = folder / 'out' / 'holes' / 'ledger.journal'
        self._output = output

    def history(self) -> History:
        try:
            with Journal(self._ledger) as ledger:
                return ledger.history()
        except BadInput:  # there is none yet, or nothing is in it yet
            return History()

    def samples(self) -> int:
        return sum(trainer.samples for trainer in self.history().trainings)

    def may_end(self) -> None:
        self._go.touch()

    def goes_on(self) -> None:
        """Wait for more checkpoints than there are."""
        before = self.samples()
        self.until(lambda: self.samples() > before)

    def until(self, condition: Callable[[], object]) -> None:
        def true_or_over() -> bool:
            assert self.process.poll() is None, self.said()
            return bool(condition())

        wait_until(true_or_over)

    def said(self) -> str:
        return self._output.read_text()[-8000:]


@contextmanager
def digits(folder: Path) -> Iterator[Run]:
    (folder / 'site.toml').write_text(SITE)
    output = folder / 'output'
    with output.open('w') as said:
        options = ['--site', folder / 'site.toml', '--out', folder / 'out', '--epochs', str(EPOCHS)]
        process = Program(
            [sys.executable, '-m', 'tests.support.held', folder / 'go', *options],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            more_env=template.for_nodes(),
            cwd=folder,
        )
    try:
        yield Run(folder, process, output)
    finally:
        process.kill()
        process.wait()


def take(slurm: Cluster, run: Run, nodes: int, seconds: float = 4.0) -> None:
    """Another user's job takes nodes that are in use, and gives them back."""
    job = slurm.submit(f'--nodes={nodes}', '--time=2', '--partition=batch', seconds=seconds)

    def over() -> bool:
        slurm.resume()
        return slurm.state(job) == 'COMPLETED'

    slurm.wait(over)
    run.goes_on()


def sizes(history: History) -> set[int]:
    """Numbers of nodes of the run's blocks."""
    return {block.opened.request.nodes for block in history.blocks}


def test_a_training_survives_all_that_a_cluster_does(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / 'a $HOME & more'
    folder.mkdir()
    with digits(folder) as run:
        run.until(lambda: run.samples() > 0)
        take(slurm, run, 2)

        slurm.stop_scheduler()
        with contextlib.ExitStack() as stack:
            stack.callback(slurm.start_scheduler)
            run.goes_on()

        node = next(node.name for node in reversed(run.history().nodes) if node.left_at is None)
        slurm.kill_node(node)
        run.goes_on()
        slurm.start_node(node, idle=False)
        run.goes_on()

        scheduler = slurm.scheduler()
        os.kill(scheduler, signal.SIGSTOP)
        try:
            before = run.samples()
            time.sleep(SILENT_S)
            assert run.samples() > before, 'it trains on while nobody answers'
        finally:
            os.kill(scheduler, signal.SIGCONT)

        for nodes in (1, 3, 1, 2, 1, 3, 2, 1):
            if len(run.history().blocks) < BLOCKS or len(sizes(run.history())) < 3:
                take(slurm, run, nodes)
        run.may_end()
        assert run.process.wait(LIMIT_S) == 0, run.said()
    history = run.history()
    asked = [block.opened.request.nodes for block in history.blocks]
    print(f'blocks of {asked} nodes, {len(history.fragments)} fragments')
    assert len(history.blocks) >= BLOCKS
    assert len(sizes(history)) >= 3
    assert {'taken', 'lost'} & {node.how for node in history.nodes}
    summary = json.loads((folder / 'out' / 'summary.json').read_text())['trainers']
    for trainer in summary.values():
        assert trainer['weights_equal']
        assert trainer['samples'] == trainer['samples_expected']

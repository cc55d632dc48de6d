"""A training over nodes that are computers of their own, one of which is cut off for a while."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.training.checkpoint.export import load_weights
from tests.support.computers import Computer, computers
from tests.support.login import SEED, SHARDS
from tests.support.ranks import order, ranks, running_fork_server
from tests.support.training import fit
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
EPOCHS, PAUSE_S = 2, 0.05
CUT_S = float(os.environ.get('FREETRAIN_CUT_S', '0'))
"""Minimum length of the cut; it lasts at least until the node has been given up."""


def reader_of(path: Path) -> Journal | None:
    """None as long as the run has not made its ledger."""
    with suppress(BadInput):
        return Journal(path)
    return None


def cut_off_and_back(folder: Path, far: Computer) -> None:
    """Cut a node off when a fragment over both has saved a checkpoint, until it is given up."""
    ledger_path = folder / 'checkpoints' / 'ledger.journal'
    reader = wait_until(lambda: reader_of(ledger_path))
    assert reader is not None
    with reader as ledger:
        cut = wait_until(lambda: over_both(ledger.history()))
        assert cut is not None
        far.cut_off()
        began = time.monotonic()
        wait_until(lambda: ledger.history().fragments[cut - 1].ending)
        assert ledger.history().fragments[cut - 1].ending == 'preempted'
        time.sleep(max(0.0, began + CUT_S - time.monotonic()))
        far.join_again()
        wait_until(lambda: len(ledger.history().fragments) > cut)


def over_both(history: History) -> int | None:
    """The fragment that runs on both nodes (not always the first), or None without a checkpoint."""
    for fragment in history.fragments:
        if fragment.ended is None and len(fragment.nodes) == 2 and fragment.checkpoints:
            return fragment.number
    return None


@pytest.mark.long
def test_a_node_that_is_cut_off_and_a_bad_line_change_no_bit(tmp_path: Path) -> None:
    with running_fork_server(tmp_path) as server:
        alone = order(tmp_path / 'alone', total_epochs=EPOCHS, shards=SHARDS, seed=SEED)
        with ranks(server, alone, 1, tmp_path / 'alone', fit) as gang:
            undisturbed = load_weights(gang.run()[0].path)
    with computers(3) as (login, near, far):
        far.bad_line(delay_ms=50, loss_percent=5)
        words = [sys.executable, '-m', 'tests.support.login', str(tmp_path), str(EPOCHS)]
        words += [str(PAUSE_S), near.name, far.name]
        with (tmp_path / 'output').open('w+') as output:
            words, env = login.command(words), os.environ | {'PYTHONPATH': str(ROOT)}
            run = subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=output)
            try:
                cut_off_and_back(tmp_path, far)
                assert run.wait(LIMIT_S) == 0, (tmp_path / 'output').read_text()
            finally:
                run.kill()
                run.wait()
    found = load_weights((tmp_path / 'output').read_text().split()[-1])
    assert all(torch.equal(found[name], undisturbed[name]) for name in undisturbed)

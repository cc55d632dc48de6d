"""The short forms of the chaos runs; the full one is ``make chaos``."""

from pathlib import Path

import pytest
import torch

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from tests.chaos import monkey, sharded
from tests.chaos.fault_kinds import ON_SMALL_DISK
from tests.chaos.training import BATCH, NAME, SAMPLES
from tests.support.ranks import running_fork_server


@pytest.mark.long
def test_faults_at_random_change_no_bit_and_count_no_sample_twice(tmp_path: Path) -> None:
    """Each of these kinds of fault at least once; 'make chaos' has more."""
    kinds = {
        'rank', 'stop rank', 'manager', 'block', 'submitting process', 'corrupt checkpoint',
        'half-written checkpoint', 'full disk', 'full inodes', 'damaged ledger',
    }  # fmt: skip
    said: list[str] = []
    counts = monkey.chaos(
        fragments=8, seed=4, nodes=3, folder=tmp_path, say=said.append, kinds=kinds
    )
    assert counts.keys() >= kinds - set(ON_SMALL_DISK)
    assert 'bit for bit' in said[-1]


def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few samples, a sample that counted twice, and a weight that differs are all seen."""
    right = {'count': torch.full((SAMPLES,), 3 / BATCH), 'w': torch.ones(2)}
    twice = {**right, 'count': right['count'] + torch.eye(SAMPLES)[5] / BATCH}
    other = {**right, 'w': torch.nextafter(torch.ones(2), torch.zeros(2))}
    made = {str(number): tensors for number, tensors in enumerate((right, twice, other))}
    monkeypatch.setattr(monkey, 'weights', lambda checkpoint: made[checkpoint.path])
    monkeypatch.setattr(
        monkey,
        'same_weights',
        lambda a, b: all(torch.equal(made[a.path][k], made[b.path][k]) for k in right),
    )
    good, doubled, different = (Checkpoint('chaos', path, 3 * SAMPLES, 1) for path in made)
    monkey.check(good, good, 3)
    bad = (doubled, 3, 'do not count 3 times'), (different, 3, 'weights differ')
    for ended, epochs, words in ((good, 4, 'were wanted'), *bad):
        with pytest.raises(monkey.Broken, match=words):
            monkey.check(ended, good, epochs)


def test_a_damaged_ledger_does_not_begin_the_count_of_fragments_anew(tmp_path: Path) -> None:
    """Else a run with such faults has no end."""
    run = monkey.Run(tmp_path, nodes=1)
    assert run.fragments() == 0
    PosixCheckpointStore(run.store, NAME).fence(7)
    (tmp_path / 'checkpoints' / 'ledger.journal').write_bytes(b'x' * 5000)
    assert run.fragments() == 7
    run.kill()


@pytest.mark.long
def test_faults_on_a_sharded_training_change_no_bit(tmp_path: Path) -> None:
    said: list[str] = []
    with running_fork_server(tmp_path) as fork_server:
        sharded.chaos(fork_server, tmp_path, faults=4, seed=3, say=said.append)
    assert 'the weights are equal' in said[-1]

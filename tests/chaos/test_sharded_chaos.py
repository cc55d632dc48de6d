"""The short form of the random faults on a sharded training."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.sharded import chaos
from tests.support.ranks import running_fork_server


def test_faults_on_a_sharded_training_change_no_bit(tmp_path: Path) -> None:
    said: list[str] = []
    with running_fork_server(tmp_path) as fork_server:
        chaos(fork_server, tmp_path, faults=4, seed=3, say=said.append)
    assert 'the weights are equal' in said[-1]

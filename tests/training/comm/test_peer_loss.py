"""Which errors of an exchange mean that another rank is gone."""

from __future__ import annotations

from pathlib import Path

from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import order, ranks


def test_an_error_of_the_own_exchange_is_not_a_lost_rank(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    """It would be repeated in fragment after fragment, and nobody would hear of it."""

    def train(ctx: FragmentContext) -> None:
        import torch

        ctx._peers.broadcast([torch.ones(2, 2).to_sparse()])

    with ranks(fork_server, order(tmp_path), 2, tmp_path, train) as gang:
        outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'error'}, outcomes
    assert outcomes[0].error.type != 'PeerLost'

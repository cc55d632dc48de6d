"""What the end of a block means for its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from parsl_freetrain import BackfillProvider, LocalSite
from parsl_freetrain.core.model.types import BlockNodes, BlockRequest, NodeDemand
from parsl_freetrain.executor import notices as no
from parsl_freetrain.executor.block.adoption import AdoptedBlock
from parsl_freetrain.executor.block.blocks import BlockManager
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.sites.batch.life import BlockLife, status_of


class Told:
    """A subscriber that remembers."""

    def __init__(self) -> None:
        self.notices: list[no.Notice] = []

    def take(self, notice: no.Notice) -> None:
        self.notices.append(notice)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ('life', 'how'), [(BlockLife.OUT_OF_MEMORY, no.OUT_OF_MEMORY), (BlockLife.PREEMPTED, 'taken')]
)
def test_the_nodes_of_a_job_that_ran_out_of_memory_are_gone_for_that_reason(
    life: BlockLife, how: str
) -> None:
    told, nobody = Told(), cast(Any, None)
    provider = BackfillProvider(LocalSite(nodes=1))
    blocks = BlockManager(provider, no.Stream([told]), nobody, '', nobody, list, nobody, nobody)
    blocks.adopt(AdoptedBlock('b1', '7', BlockRequest(1, 60.0)), 0.0)
    blocks.blocks['b1'].nodes['n1'] = 'node01'
    blocks.poll({'b1': status_of('7', life)}, 1.0)
    assert [notice.how for notice in told.notices if isinstance(notice, no.NodeGone)] == [how]


class Shared(LocalSite):
    """A site with other people's jobs."""

    def needed(self) -> tuple[tuple[NodeDemand, ...], tuple[BlockNodes, ...]]:
        return (), ()

    def release(self, job_id: str, names: Sequence[str]) -> None:
        pass


def test_nodes_of_others_are_told_to_end_as_soon_as_nothing_of_them_is_awaited() -> None:
    nobody = cast(Any, None)
    sent: list[dict[str, Any]] = []

    def submit(context: dict[str, Any], _: bytes) -> Any:
        sent.append(context)

    provider = BackfillProvider(Shared(nodes=1))
    blocks = BlockManager(provider, no.Stream([]), nobody, '', nobody, list, nobody, submit)
    blocks.adopt(AdoptedBlock('b1', '7', BlockRequest(1, 60.0)), 0.0)
    blocks.blocks['b1'].greeted.add('n1')
    blocks.blocks['b1'].nodes['n1'] = 'node01'
    blocks.result_arrived('n1')
    assert not sent
    blocks.noticed('n1', 1.0)
    blocks.result_arrived('n1')
    assert [context['resource_spec'] for context in sent] == [{PIN: 'n1'}]
    assert sent[0]['task_executor']['f'].endswith('.leave')
    blocks.close(['b1'], 2.0)
    assert sent[1:] == sent[:1]

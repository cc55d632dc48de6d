"""When a block has its nodes; what waiting jobs need of them; which logs of blocks are kept."""

from collections.abc import Callable
from pathlib import Path

from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.events import BlockStarted
from parsl_freetrain.core.model.types import BlockNodes, BlockRequest, NodeDemand
from parsl_freetrain.executor.block import block_record


def test_a_block_starts_once_and_not_before_it_was_last_seen_waiting() -> None:
    block = block_record.BlockRecord('7', BlockRequest(1), waited_at=1.0)
    assert block.look('b', JobStatus(JobState.PENDING), 5.0) == []
    assert block.look('b', None, 6.0) == block.look('b', JobStatus(JobState.UNKNOWN), 7.0) == []
    assert block.look('b', JobStatus(JobState.RUNNING), 9.0) == [BlockStarted(9.0, 'b', 5.0)]
    assert block.look('b', JobStatus(JobState.RUNNING), 10.0) == block.start('b', 11.0) == []


def test_a_block_that_is_withdrawn_never_starts() -> None:
    block = block_record.BlockRecord('7', BlockRequest(1), waited_at=1.0)
    assert block.look('b', JobStatus(JobState.CANCELLED), 5.0) == []
    assert block.look('b', JobStatus(JobState.FAILED), 5.0) == [BlockStarted(5.0, 'b', 1.0)]


def test_hosts_become_managers_and_jobs_become_blocks() -> None:
    blocks = {
        'b1': block_record.BlockRecord('7', BlockRequest(2), managers={'n1': 'm1', 'n2': 'm2'}),
        'b2': block_record.BlockRecord('8', BlockRequest(1), noticed=True),
    }
    hosts = frozenset({'n1', 'n2', 'n3', 'n4'})
    needed = [NodeDemand('9', 2, hosts, frozenset({'n2', 'n4'}))]
    lent = [BlockNodes('7', ('n1', 'n2'), frozenset({'n2'})), BlockNodes('8', ('n3',))]
    found = block_record.nodes_needed(1.0, needed, [*lent, BlockNodes('6', ('n4',))], blocks)
    assert found.demands == (
        NodeDemand('9', 2, frozenset({'m1', 'm2', 'b2 n3'}), frozenset({'m2'})),
    )
    both = BlockNodes('b1', ('m1', 'm2'), frozenset({'m2'}))
    assert found.blocks == (both, BlockNodes('b2', ('b2 n3',), leaving=True))


def test_logs_of_the_first_blocks_go_when_there_are_many_nodes(tmp_path: Path) -> None:
    stalls = True

    def beside(work: Callable[[], object]) -> bool:
        return not stalls and work() is None

    logs = block_record.BlockLogs(str(tmp_path), str(tmp_path), lambda: str(tmp_path), beside)
    most = block_record.NODES // 50
    for block in range(block_record.BLOCKS + most):
        stalls = block < block_record.BLOCKS + 3
        names = [f'{block}-{node}' for node in range(49)]
        for name in names:
            (tmp_path / f'block-{block}' / name).mkdir(parents=True)
            (tmp_path / f'block-{block}' / name / 'manager.log').touch()
            (tmp_path / f'fork-server-{name}.log').touch()
        (tmp_path / f'parsl.freetrain.block-{block}.1.2.sh').touch()
        logs.ended(str(block), names)
    kept = {str(block) for block in range(block_record.BLOCKS + most)[-block_record.BLOCKS :]}
    assert {path.name.removeprefix('block-') for path in tmp_path.glob('block-*')} == kept
    assert {path.name.split('.')[2] for path in tmp_path.glob('parsl.*')} == {
        f'block-{block}' for block in kept
    }
    assert len(list(tmp_path.glob('fork-server-*'))) == 49 * block_record.BLOCKS

"""Which logs of blocks are kept."""

from collections.abc import Callable
from pathlib import Path

from parsl_freetrain.executor.block.block_record import BLOCKS, NODES, BlockLogs


def test_logs_of_the_first_blocks_go_when_there_are_many_nodes(tmp_path: Path) -> None:
    stalls = True

    def beside(work: Callable[[], object]) -> bool:
        return not stalls and work() is None

    logs = BlockLogs(str(tmp_path), str(tmp_path), lambda: str(tmp_path), beside)
    most = NODES // 50
    for block in range(BLOCKS + most):
        stalls = block < BLOCKS + 3
        names = [f'{block}-{node}' for node in range(49)]
        for name in names:
            (tmp_path / f'block-{block}' / name).mkdir(parents=True)
            (tmp_path / f'block-{block}' / name / 'manager.log').touch()
            (tmp_path / f'fork-server-{name}.log').touch()
        (tmp_path / f'parsl.freetrain.block-{block}.1.2.sh').touch()
        logs.ended(str(block), names)
    kept = {str(block) for block in range(BLOCKS + most)[-BLOCKS:]}
    assert {path.name.removeprefix('block-') for path in tmp_path.glob('block-*')} == kept
    assert {path.name.split('.')[2] for path in tmp_path.glob('parsl.*')} == {
        f'block-{block}' for block in kept
    }
    assert len(list(tmp_path.glob('fork-server-*'))) == 49 * BLOCKS

"""The logs of ranks that a trainer keeps."""

from pathlib import Path

import pytest

from parsl_freetrain.executor.fragment.member import prune_logs


@pytest.mark.parametrize(('ranks', 'first', 'oldest'), [(1, 1, 201), (128, 1181, 1191)])
def test_old_logs_go_but_never_those_of_the_last_fragments(
    tmp_path: Path, ranks: int, first: int, oldest: int
) -> None:
    (tmp_path / 'notes').touch()
    for fragment in range(first, 1201):
        for rank in range(ranks):
            (tmp_path / f'fragment-{fragment:06d}-rank-{rank}.log').touch()
    (tmp_path / f'ahead-of-{first:06d}-n0-0.log').touch()
    prune_logs(tmp_path, 1200)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept[0] == f'fragment-{oldest:06d}-rank-0.log' and kept[-1] == 'notes'
    assert len(kept) - 1 == ranks * (1201 - oldest)

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.trainers import ReplayTrainer, read_trainers

GOOD: dict[str, Any] = {'name': 'a', 'submit_s': 5.5, 'min_nodes': 2, 'max_nodes': 8}
GOOD |= {'rescale_up_s': 18.0, 'rescale_down_s': 12, 'total_samples': 1e6}
GOOD |= {'nodes': [0, 1, 8], 'samples_per_s': [0, 10.0, 60], 'objective': [0, 1, 6]}


def read(tmp_path: Path, *trainers: Any) -> tuple[ReplayTrainer, ...]:
    path = tmp_path / 'trainers.json'
    path.write_text(json.dumps(list(trainers)))
    return read_trainers(path)


def test_a_trainer_with_all_it_can_have_and_one_with_what_it_must(tmp_path: Path) -> None:
    few = {'name': 'b', 'max_nodes': 4, 'total_samples': 7}
    few |= {'nodes': [1, 4], 'samples_per_s': [1, 3]}
    curve = ScalingCurve((1, 4), (1, 3))
    assert read(tmp_path, GOOD, few) == (
        ReplayTrainer(
            Trainer('a', 2, 8, 1_000_000, ScalingCurve((0, 1, 8), (0, 10, 60)), 18, 12),
            5.5,
            ScalingCurve((0, 1, 8), (0, 1, 6)),
        ),
        ReplayTrainer(Trainer('b', 1, 4, 7, curve, 0, 0), 0, curve),
    )


@pytest.mark.parametrize(
    ('change', 'says'),
    [
        ({'nodes': [0, 8, 1]}, "trainer 'a': The node counts of a scaling curve must increase"),
        ({'nodes': [0, 1, 1]}, "trainer 'a': The node counts of a scaling curve must increase"),
        ({'nodes': [0, 1]}, "trainer 'a': A scaling curve needs one rate for each node count"),
        (
            {'samples_per_s': [0, 10, -1]},
            "trainer 'a': The rate of a scaling curve is [0.0, 10.0, -1.0]; it must be finite",
        ),
        (
            {'samples_per_s': [1, 10, 20]},
            "trainer 'a': The rate of a scaling curve at 0 nodes must be 0",
        ),
        ({'samples_per_s': [0, 0, 0]}, "Trainer 'a': its scaling curve has rate 0"),
        (
            {'objective': [0, 0, 0]},
            "trainer 'a': the objective is 0 at every count from 2 to 8 nodes",
        ),
        ({'max_nodes': 1}, "Trainer 'a': min_nodes is 2 and max_nodes 1"),
        ({'rescale_up_s': -1}, "Trainer 'a': rescale_up_s is -1"),
        ({'total_samples': 0.5}, "trainer 'a': total_samples is 0.5"),
        ({'total_samples': 0}, "Trainer 'a': total_samples is 0"),
        ({'nodes': []}, "trainer 'a': A scaling curve needs"),
        ({'max_nodes': 'many'}, "trainer 'a': max_nodes is 'many'; it must be a whole number"),
        ({'maxnodes': 3}, "trainer 'a': there is no maxnodes"),
        ({'name': ''}, "trainer 1: name is ''; it must be a text that is not empty"),
    ],
)
def test_a_bad_trainer_gets_its_place(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as raised:
        read(tmp_path, GOOD | change)
    assert says in str(raised.value)
    assert str(tmp_path / 'trainers.json') in str(raised.value)
    assert '\n' not in str(raised.value)


def test_two_trainers_of_one_name_and_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="two trainers are called 'a'"):
        read(tmp_path, GOOD, GOOD)
    with pytest.raises(BadInput, match='has no trainer'):
        read(tmp_path)


@pytest.mark.parametrize(
    'data', [b'[{', b'{}', b'\xff\xfe', b'["a"]', gzip.compress(b'[]' * 99, mtime=0)[:-9]]
)
def test_what_is_no_list_of_trainers_gets_a_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / 'trainers.json'
    path.write_bytes(data)
    for bad in (path, tmp_path, tmp_path / 'absent'):
        with pytest.raises(BadInput) as raised:
            read_trainers(bad)
        assert str(bad) in str(raised.value)

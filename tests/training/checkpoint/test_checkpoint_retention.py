"""Which checkpoints stay."""

import math
from pathlib import Path

import msgspec
import pytest

from parsl_freetrain import BadInput, Checkpoint, Retention, Samples, Shape
from parsl_freetrain.training.spec.fork_messages import Launch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Decoder, encode
from parsl_freetrain.training.spec.training import TrainingSpec
from tests.support.ranks import order


def kept(retention: Retention, *points: tuple[int, float | None]) -> list[int]:
    """Positions of what stays of checkpoints that are each of a fragment and have a loss."""
    checkpoints = [
        Checkpoint('t', str(i), 100 * i, fragment, {} if loss is None else {'loss': loss})
        for i, (fragment, loss) in enumerate(points)
    ]
    return sorted(map(int, retention.kept(checkpoints)))


def test_the_newest_stay() -> None:
    points = [(1, None)] * 5
    assert kept(Retention(), *points) == [2, 3, 4]
    assert kept(Retention(last=1), *points) == [4]
    assert kept(Retention(last=9), *points) == [0, 1, 2, 3, 4]
    assert kept(Retention()) == []


def test_the_last_of_every_nth_fragment_stays() -> None:
    points = [(fragment, None) for fragment in (1, 2, 2, 3, 4, 4, 5, 6)]
    assert kept(Retention(last=1, every=2), *points) == [2, 5, 7]
    assert kept(Retention(last=1, every=4), *points) == [5, 7]


def test_the_best_stays_and_of_equals_the_newest() -> None:
    points = [(1, 0.5), (1, 0.2), (1, 0.9), (1, 0.2), (1, math.nan), (1, None)]
    assert kept(Retention(last=1, best='loss'), *points) == [3, 5]
    assert kept(Retention(last=1, best='loss', mode='max'), *points) == [2, 5]
    assert kept(Retention(last=1, best='accuracy'), *points) == [5]
    assert kept(Retention(last=1, best='loss'), (1, -math.inf), (1, 0.0)) == [0, 1]


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: Retention(0), 'last is 0; it must be at least 1'),
        (lambda: Retention(every=0), 'every is 0; it must be at least 1'),
        (
            lambda: Retention(best='loss', mode='smallest'),  # type: ignore[arg-type]
            "mode is 'smallest'; it must be 'min' or 'max'",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: type[Retention], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        make()


def test_an_order_survives_json(tmp_path: Path) -> None:
    sent = order(tmp_path, keep=Retention(2, every=5, best='loss', mode='max'))
    assert msgspec.json.decode(msgspec.json.encode(sent), type=FragmentOrder) == sent


def test_an_order_with_shapes_is_read_from_json() -> None:
    spec = TrainingSpec(
        min_nodes=1, max_nodes=1, goal=Samples(1), sizes=(1,), shapes={1: (Shape(),)}
    )
    sent = Launch(FragmentOrder('t', 1, '', spec, None), RankPlace(0, 1, 0, 1, ''), {}, '')
    reader: Decoder[Launch] = Decoder(Launch, 'a test')
    assert reader.decode(encode(sent)) == sent

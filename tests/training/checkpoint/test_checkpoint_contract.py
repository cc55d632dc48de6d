"""What holds for every way of keeping checkpoints: at once, and by a thread beside training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.store import CheckpointStore, Fenced, PosixCheckpointStore
from parsl_freetrain.training.loop.background import Background
from parsl_freetrain.training.spec.retention import Retention


class Make(Protocol):
    def __call__(self, folder: Path) -> CheckpointStore: ...


class ByAThread(PosixCheckpointStore):
    """Saves as the keeper does in the midst of training."""

    def save(
        self,
        write: Callable[[Path], Mapping[str, tuple[str, ...]] | None],
        *,
        samples: int,
        fragment: int,
        metrics: Mapping[str, float],
    ) -> Checkpoint:
        saved: list[Checkpoint] = []
        background = Background('test')
        save_now = super().save
        background.start(
            lambda: saved.append(
                save_now(write, samples=samples, fragment=fragment, metrics=metrics)
            )
        )
        background.wait()
        return saved[0]


@pytest.fixture(params=[PosixCheckpointStore, ByAThread])
def make(request: pytest.FixtureRequest) -> Make:
    def made(folder: Path) -> CheckpointStore:
        store: CheckpointStore = request.param(folder, 't')
        return store

    return made


def save(store: CheckpointStore, samples: int, fragment: int = 1, **metrics: float) -> Checkpoint:
    def write(folder: Path) -> None:
        (folder / 'data').write_bytes(b'x' * samples)

    return store.save(write, samples=samples, fragment=fragment, metrics=metrics)


def test_an_empty_store_has_nothing(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path / 't')
    assert (store.latest(), store.checkpoints(), store.last_fragment(), store.set_aside) == (
        None,
        (),
        0,
        (),
    )
    store.prune(Retention())


def test_what_was_saved_is_found_by_others(make: Make, tmp_path: Path) -> None:
    first, second = save(make(tmp_path / 't'), 100, loss=0.5), save(make(tmp_path / 't'), 200, 2)
    store = make(tmp_path / 't')
    assert store.latest() == second
    assert store.checkpoints() == (first, second)
    assert store.last_fragment() == 2
    assert (Path(second.path) / 'data').read_bytes() == b'x' * 200


def test_a_fence_holds_for_earlier_fragments_only(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path / 't')
    store.fence(3)
    with pytest.raises(Fenced, match='fragment 3 has begun'):
        save(store, 100, 2)
    assert store.checkpoints() == ()
    save(store, 100, 3)
    assert store.last_fragment() == 3


def test_what_fails_leaves_nothing_and_says_so(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path / 't')
    before = save(store, 100)

    def write(folder: Path) -> None:
        (folder / 'half').write_bytes(b'x')
        raise OSError(28, 'No space left on device')

    with pytest.raises(OSError, match='No space left'):
        store.save(write, samples=200, fragment=1, metrics={})
    assert store.checkpoints() == (before,)
    assert len(list((tmp_path / 't').glob('ckpt-*'))) == 1


def test_damage_is_set_aside_and_pruning_waits_for_a_good_one(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path / 't')
    first, second = save(store, 100), save(store, 200)
    (Path(second.path) / 'data').write_bytes(b'y' * 200)
    store.prune(Retention(1))
    assert store.latest() == first
    assert [aside.reason for aside in store.set_aside] == [
        'data does not have the digest that was committed'
    ]


def test_retention_keeps_what_any_of_its_rules_keeps(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path / 't')
    for fragment in range(1, 8):
        save(store, 100 * fragment, fragment, loss=abs(fragment - 3.1))
        store.prune(Retention(last=2, every=4, best='loss'))
    assert [checkpoint.fragment for checkpoint in store.checkpoints()] == [3, 4, 6, 7]

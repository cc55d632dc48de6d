"""Checkpoints: whole or not there, whatever is killed, damaged or late."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parsl_freetrain import BadInput, Checkpoint, Retention
from parsl_freetrain.training.checkpoint.directories import fresh, name_of
from parsl_freetrain.training.checkpoint.folder_claim import claim
from parsl_freetrain.training.checkpoint.identity import JSON
from parsl_freetrain.training.checkpoint.store import Fenced, PosixCheckpointStore
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from tests.support.damage import flip
from tests.support.ranks import order

STEPS = ('begin', 'written', 'manifest', 'before-commit', 'committed')


def data(content: bytes) -> Callable[[Path], None]:
    """A ``write`` that leaves one file in the directory and one in a folder below."""

    def write(path: Path) -> None:
        (path / 'state').write_bytes(content)
        (path / 'parts').mkdir()
        (path / 'parts' / '0').write_bytes(content * 100)

    return write


def saved(
    store: PosixCheckpointStore, samples: int, fragment: int = 1, content: bytes = b'state'
) -> Checkpoint:
    return store.save(
        data(content), samples=samples, fragment=fragment, metrics={'loss': 1 / samples}
    )


def content_of(checkpoint: Checkpoint | None) -> bytes:
    assert checkpoint is not None
    return (Path(checkpoint.path) / 'state').read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> PosixCheckpointStore:
    return PosixCheckpointStore(tmp_path / 't', 't')


def test_what_is_saved_comes_back(store: PosixCheckpointStore) -> None:
    assert store.latest() is None
    assert store.checkpoints() == ()
    assert store.last_fragment() == 0
    first = saved(store, 100, content=b'first')
    second = store.save(
        data(b'second'), samples=200, fragment=3, metrics={'loss': 0.5, 'accuracy': float('nan')}
    )
    found = PosixCheckpointStore(store.folder, 't').latest()
    assert found == second
    assert content_of(found) == b'second'
    assert found is not None
    assert (found.trainer, found.samples, found.fragment) == ('t', 200, 3)
    assert found.metrics['loss'] == 0.5
    assert store.checkpoints() == (first, second)
    assert store.last_fragment() == 3


def test_nobody_else_can_read_or_write_what_is_saved(store: PosixCheckpointStore) -> None:
    before = os.umask(0)
    try:
        saved(store, 100)
        store.fence(1)
    finally:
        os.umask(before)
    for path in (store.folder, *store.folder.rglob('*')):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_same_samples_and_fragment_never_share_a_directory(store: PosixCheckpointStore) -> None:
    first, second = saved(store, 100, content=b'first'), saved(store, 100, content=b'second')
    assert first.path != second.path
    assert content_of(first) == b'first'
    assert content_of(store.latest()) == b'second'


def test_more_samples_are_newer_then_the_later_fragment(store: PosixCheckpointStore) -> None:
    for samples, fragment in ((300, 1), (100, 4), (300, 2), (200, 3)):
        saved(store, samples, fragment)
    found = [(c.samples, c.fragment) for c in store.checkpoints()]
    assert found == [(100, 4), (200, 3), (300, 1), (300, 2)]
    assert store.latest() == store.checkpoints()[-1]


@pytest.mark.parametrize('step', STEPS)
def test_kill_while_saving_leaves_whole_checkpoint(store: PosixCheckpointStore, step: str) -> None:
    saved(store, 100, content=b'first')

    def hook(reached: str) -> None:
        if reached == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        saved(PosixCheckpointStore(store.folder, 't', hook=hook), 200, 2, b'second')

    process = multiprocessing.get_context('fork').Process(target=save)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert content_of(store.latest()) == (b'second' if step == 'committed' else b'first')
    assert store.set_aside == []
    # The half-written directory of this name is in nobody's way.
    again = saved(store, 200, fragment=2, content=b'again')
    assert content_of(store.latest()) == b'again'
    assert store.latest() == again


def test_a_marker_that_was_cut_off_is_no_commit_and_no_damage(store: PosixCheckpointStore) -> None:
    saved(store, 100, content=b'first')
    second = saved(store, 200)
    for length in (0, 15, 32):
        os.truncate(Path(second.path) / 'COMMITTED', length)
        assert content_of(store.latest()) == b'first'
    assert store.set_aside == []


def test_a_write_that_fails_leaves_nothing(store: PosixCheckpointStore) -> None:
    saved(store, 100)

    def write(path: Path) -> None:
        (path / 'state').write_bytes(b'half')
        raise OSError(28, 'No space left on device')

    with pytest.raises(OSError, match='No space left'):
        store.save(write, samples=200, fragment=1, metrics={})
    assert len(list(store.folder.glob('ckpt-*'))) == 1


def test_names_of_the_store_and_links_are_refused(store: PosixCheckpointStore) -> None:
    for name in ('manifest.json', 'COMMITTED'):
        with pytest.raises(BadInput, match=f'{name}.*another name'):
            store.save(lambda path: (path / name).touch(), samples=1, fragment=1, metrics={})  # noqa: B023
    link = lambda path: (path / 'link').symlink_to('/etc/hostname')  # noqa: E731
    with pytest.raises(BadInput, match="plain files and folders only, and 'link' is neither"):
        store.save(link, samples=1, fragment=1, metrics={})


def flip_a_byte(path: Path) -> None:
    flip(path / 'parts' / '0', 7)


def swap_the_trainer(path: Path) -> None:
    other = PosixCheckpointStore(path.parent.parent / 'other', 'other')
    shutil.rmtree(path)
    shutil.move(saved(other, 200, fragment=2).path, path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    'changed byte': (flip_a_byte, 'parts/0 does not have the digest'),
    'cut off': (lambda path: os.truncate(path / 'state', 3), 'state has 3 bytes, 6 were committed'),
    'file gone': (lambda path: (path / 'state').unlink(), 'state cannot be read: No such file'),
    'manifest changed': (
        lambda path: (path / 'manifest.json').write_text('{}'),
        'manifest.json does not have',
    ),
    'other trainer': (swap_the_trainer, "it is of trainer 'other'"),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_one_is_set_aside_for_the_last(store: PosixCheckpointStore, damage: str) -> None:
    saved(store, 100, content=b'first')
    second = Path(saved(store, 200, fragment=2, content=b'second').path)
    do, reason = DAMAGES[damage]
    do(second)
    assert content_of(store.latest()) == b'first'
    [aside] = store.set_aside
    assert reason in aside.reason
    assert Path(aside.path) == store.folder / 'bad' / f'{second.name}-1'
    assert (Path(aside.path) / 'reason.txt').read_text().strip() == aside.reason
    assert not second.exists()
    assert store.last_fragment() == 2, 'a number is not free again for its checkpoint is damaged'


def test_nothing_that_is_set_aside_is_lost(store: PosixCheckpointStore) -> None:
    for content in (b'a', b'b', b'c'):
        flip_a_byte(Path(saved(store, 100, content=content).path))
        assert store.latest() is None
    kept = {(Path(aside.path) / 'state').read_bytes() for aside in store.set_aside}
    assert kept == {b'a', b'b', b'c'}


def test_a_renamed_checkpoint_is_not_believed(store: PosixCheckpointStore) -> None:
    first = Path(saved(store, 100).path)
    first.rename(first.with_name('ckpt-000000000900-f000001'))
    assert store.latest() is None
    assert 'its name says otherwise' in store.set_aside[0].reason


def test_later_formats_are_no_damage(
    store: PosixCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr('parsl_freetrain.training.checkpoint.manifest.FORMAT', 9)
        saved(store, 100)
    with pytest.raises(BadInput, match='has format 9 and this version.*reads format 4'):
        store.latest()
    assert store.set_aside == []


def test_an_earlier_fragment_cannot_begin_after_a_fence(store: PosixCheckpointStore) -> None:
    for fragment in (2, 2, 1):
        store.fence(fragment)
    with pytest.raises(Fenced, match='Fragment 1 .* fragment 2 has begun'):
        saved(store, 100, fragment=1)
    assert list(store.folder.glob('ckpt-*')) == []
    saved(store, 100, fragment=2)
    for fragment in range(3, 40):
        store.fence(fragment)
    assert len(list((store.folder / 'fences').iterdir())) <= 11
    assert store.last_fragment() == 39
    with pytest.raises(Fenced, match='Fragment 3 .* fragment 39 has begun'):
        saved(store, 100, fragment=3)


@pytest.mark.parametrize('step', ['begin', 'before-commit'])
def test_a_fence_made_while_saving_holds(store: PosixCheckpointStore, step: str) -> None:
    def hook(reached: str) -> None:
        if reached == step:
            PosixCheckpointStore(store.folder, 't').fence(2)

    zombie = PosixCheckpointStore(store.folder, 't', hook=hook)
    with pytest.raises(Fenced):
        saved(zombie, 100, fragment=1)
    assert store.latest() is None
    assert store.last_fragment() == 2


def test_a_zombie_whose_directory_is_gone_is_told_of_a_fence(store: PosixCheckpointStore) -> None:
    def hook(reached: str) -> None:
        if reached == 'begin':
            store.fence(2)
            saved(store, 100, fragment=2)
            store.prune(Retention(1))

    with pytest.raises(Fenced):
        saved(PosixCheckpointStore(store.folder, 't', hook=hook), 50, fragment=1)
    assert [checkpoint.fragment for checkpoint in store.checkpoints()] == [2]


def test_pruning_keeps_the_newest_and_clears_earlier_leftovers(store: PosixCheckpointStore) -> None:
    for samples in (100, 200, 300, 400):
        saved(store, samples, fragment=samples // 100)
    for name in ('350-f000003', '450-f000004', '450-f000005'):
        data(b'half')(fresh(store.folder, name_of(*map(int, name.split('-f')))))
    (store.folder / 'notes').mkdir()
    store.prune(Retention(2))
    assert [checkpoint.samples for checkpoint in store.checkpoints()] == [300, 400]
    left = sorted(path.name.removeprefix('ckpt-000000000') for path in store.folder.iterdir())
    assert left == ['300-f000003', '400-f000004', '450-f000004', '450-f000005', 'notes']


def test_pruning_trusts_only_a_newest_that_was_read_again(store: PosixCheckpointStore) -> None:
    for samples in (100, 200, 300):
        saved(store, samples)
    flip_a_byte(Path(store.checkpoints()[-1].path))
    store.prune(Retention(1))
    assert [checkpoint.samples for checkpoint in store.checkpoints()] == [200]
    assert len(store.set_aside) == 1


def test_pruning_keeps_the_fragments_state_when_a_zombie_led(store: PosixCheckpointStore) -> None:
    saved(store, 100, fragment=1)
    saved(store, 500, fragment=1)
    saved(store, 200, fragment=2)
    store.prune(Retention(1))
    assert [(c.samples, c.fragment) for c in store.checkpoints()] == [(200, 2), (500, 1)]


def test_readers_find_a_checkpoint_while_others_save_and_prune(store: PosixCheckpointStore) -> None:
    saved(store, 1)
    over = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        reader = PosixCheckpointStore(store.folder, 't')
        newest = 0
        while not over.is_set():
            found = reader.latest()
            if found is None or found.samples < newest:
                wrong.append(found)
                return
            newest = found.samples
        wrong.extend(reader.set_aside)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for samples in range(2, 25):
            saved(store, samples, fragment=samples)
            store.prune(Retention(1))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert not (store.folder / 'bad').exists()


IDENTITY: dict[str, JSON] = {'seed': 1, 'batch_size': 64, 'shape': (3, 4)}


def test_a_fresh_folder_is_claimed_and_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / 'checkpoints' / 't'
    assert claim(folder, 't', IDENTITY, 'auto') is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ['trainer.json']
    assert claim(folder, 't', IDENTITY, 'auto') is None
    os.truncate(folder / 'trainer.json', 0)  # a crash of the computer before the first fence
    assert claim(folder, 't', IDENTITY, 'auto') is None and (folder / 'trainer.json').stat().st_size
    saved(PosixCheckpointStore(folder, 't'), 100)
    for resume in ('auto', 'require'):
        found = claim(folder, 't', IDENTITY, resume)
        assert found is not None
        assert found.samples == 100


def test_claiming_finds_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    claim(tmp_path, 't', IDENTITY, 'auto')
    store = PosixCheckpointStore(tmp_path, 't')
    saved(store, 100)
    flip_a_byte(Path(saved(store, 200).path))
    found = claim(tmp_path, 't', IDENTITY, 'require')
    assert found is not None
    assert found.samples == 100
    flip_a_byte(Path(found.path))
    with pytest.raises(
        BadInput, match=r"'require'.*no usable checkpoint .*kept in its folder 'bad'.*resume='auto'"
    ):
        claim(tmp_path, 't', IDENTITY, 'require')


def test_requiring_a_checkpoint_where_there_is_no_folder_makes_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'require', but there is no folder"):
        claim(tmp_path / 'typo', 't', IDENTITY, 'require')
    assert not (tmp_path / 'typo').exists()


def test_another_trainers_folder_is_refused_with_what_differs(tmp_path: Path) -> None:
    claim(tmp_path, 't', IDENTITY, 'auto')
    with pytest.raises(
        BadInput, match=r"belongs to trainer 't', not to 'u': give .* name or folder, or resume"
    ):
        claim(tmp_path, 'u', IDENTITY, 'auto')
    with pytest.raises(BadInput) as raised:
        claim(tmp_path, 't', {'seed': 2, 'shape': [3, 4], 'lr': 0.1}, 'auto')
    sentence = str(raised.value)
    assert str(tmp_path) in sentence
    assert 'had batch_size 64 (here unset), lr unset (here 0.1), seed 1 (here 2): ' in sentence
    assert 'shape' not in sentence
    assert "resume='never'" in sentence


def test_starting_anew_keeps_what_was_there(tmp_path: Path) -> None:
    claim(tmp_path, 't', IDENTITY, 'auto')
    saved(PosixCheckpointStore(tmp_path, 't'), 100, fragment=7, content=b'old')
    zombie = PosixCheckpointStore(tmp_path, 't')
    assert claim(tmp_path, 'u', {'seed': 2}, 'never') is None
    with pytest.raises(Fenced):  # it cannot commit into the new one
        saved(zombie, 200, fragment=7)
    assert PosixCheckpointStore(tmp_path, 'u').last_fragment() == 8
    [old] = (tmp_path / 'old-1').glob('ckpt-*')
    assert (old / 'state').read_bytes() == b'old'
    assert json.loads((tmp_path / 'old-1' / 'trainer.json').read_text())['trainer'] == 't'
    saved(PosixCheckpointStore(tmp_path, 'u'), 50, fragment=9)
    assert claim(tmp_path, 'u', {'seed': 2}, 'never') is None
    assert len(list((tmp_path / 'old-2').glob('ckpt-*'))) == 1
    assert claim(tmp_path, 'u', {'seed': 2}, 'auto') is None


def test_a_submitter_killed_while_starting_anew_can_do_it_again(tmp_path: Path) -> None:
    claim(tmp_path, 't', IDENTITY, 'auto')
    saved(PosixCheckpointStore(tmp_path, 't'), 100, fragment=1)
    claim(tmp_path, 't', IDENTITY, 'never')
    # Killed when all was moved and the new name not yet written.
    (tmp_path / 'trainer.json').unlink()
    (tmp_path / '.freetrain-0123').write_text('{"tra')
    assert claim(tmp_path, 't', IDENTITY, 'auto') is None
    assert PosixCheckpointStore(tmp_path, 't').last_fragment() == 2


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / 'thesis.tex').write_text('important')
    for resume in ('auto', 'require', 'never'):
        with pytest.raises(BadInput, match=r'is not empty and is no checkpoint folder'):
            claim(tmp_path, 't', IDENTITY, resume)
    assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    for folder in (tmp_path / 'file', tmp_path / 'file' / 't', Path('/proc/freetrain/t')):
        said = f"Checkpoints of trainer 't' cannot be written to {folder}"
        with pytest.raises(BadInput, match=said):
            claim(folder, 't', IDENTITY, 'auto')


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o707)
    with pytest.raises(BadInput, match='mode 0707'):
        claim(tmp_path, 't', IDENTITY, 'auto')


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


def test_what_cannot_be_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({'last': 0}, 'last is 0; it must be at least 1'),
        ({'every': 0}, 'every is 0; it must be at least 1'),
        ({'best': 'loss', 'mode': 'smallest'}, "mode is 'smallest'; it must be 'min' or 'max'"),
    ]
    for settings, sentence in wrong:
        with pytest.raises(BadInput, match=sentence):
            Retention(**settings)


def test_an_order_survives_json(tmp_path: Path) -> None:
    sent = order(tmp_path, keep=Retention(2, every=5, best='loss', mode='max'))
    assert msgspec.json.decode(msgspec.json.encode(sent), type=FragmentOrder) == sent

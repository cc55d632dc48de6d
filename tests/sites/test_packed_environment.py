"""An environment that nodes unpack to their disk; a small one, which refers to the tests'."""

import os
import platform
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from parsl_freetrain import BadInput, FragmentContext, LocalSite, PackedEnvironment, freetrain_app
from parsl_freetrain.sites import packed_environment
from parsl_freetrain.sites.packed_environment import SCRIPT, packer
from tests.chaos.disks import DISK_MB, small_disk
from tests.support.other_user import needs_root
from tests.support.programs import run_to_end
from tests.support.ranks import finish
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S

pytest.importorskip('venv_pack')
ROOT = Path(__file__).resolve().parents[2]
TELL = ['python3', '-c', 'import sys; print(sys.prefix)']


@pytest.fixture(scope='module')
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment whose path has a space."""
    made = tmp_path_factory.mktemp('environment') / 'of the tests'
    venv.create(made, symlinks=True)
    site = next(made.glob('lib/python*/site-packages'))
    paths = f'sys.path[:0] = [{str(ROOT)!r}, {sysconfig.get_path("purelib")!r}]'
    (site / 'own.pth').write_text(f'import sys; {paths}\n')
    return made


@pytest.fixture(scope='module')
def archive(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    PackedEnvironment(prefix=str(prefix)).prepare(tmp_path_factory.mktemp('a') / 'with a space')
    return next(tmp_path_factory.getbasetemp().glob('a*/with a space/environment/*.tar'))


def run(command: str, local: Path) -> tuple[str, str]:
    """The environment in which a node's command runs, and what was said."""
    environment = {**os.environ, 'TMPDIR': str(local), 'PYTHONPATH': ''}
    tell = subprocess.list2cmdline(TELL)
    done = run_to_end(['/bin/bash', '-c', f'{command} {tell}'], env=environment, check=True)
    return done.stdout.strip(), done.stderr


def train(ctx: FragmentContext) -> str:
    finish(ctx)
    return sys.prefix


@pytest.mark.long
def test_ranks_run_in_the_unpacked_environment(tmp_path: Path, prefix: Path) -> None:
    local = tmp_path / 'local disk'
    local.mkdir()
    packed = PackedEnvironment(prefix=str(prefix), local=str(local))
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), environment=packed) as executor:
        trained_in = freetrain_app(max_nodes=1, total_epochs=1)(train)().result(LIMIT_S).result
        (used,) = local.iterdir()
        assert trained_in == str(used)
    # The local site kills its nodes, so the next one removes what they have left.
    found, _ = run(executor._environment_command, tmp_path)
    assert Path(found).parent == local
    assert [str(path) for path in local.iterdir()] == [found]


def truncated(archive: Path, local: Path) -> None:
    os.truncate(archive, archive.stat().st_size // 2)


def flipped(archive: Path, local: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)


def no_room(archive: Path, local: Path) -> None:
    with (local / 'filler').open('wb', buffering=0) as file, suppress(OSError):
        while file.write(bytes(DISK_MB << 18)):
            pass


@pytest.mark.parametrize(
    ('damage', 'says'),
    [
        (lambda archive, local: None, ''),
        (truncated, 'is not what was packed'),
        (flipped, 'is not what was packed'),
        (lambda archive, local: archive.unlink(), 'cannot be read'),
        (lambda archive, local: local.rmdir(), 'no folder can be made in'),
        (no_room, 'No space left on device'),
    ],
    ids=['good', 'truncated', 'flipped', 'gone', 'no-folder', 'no-room'],
)
def test_a_node_that_cannot_unpack_it_says_why_and_uses_the_shared_one(
    tmp_path: Path, archive: Path, damage: Callable[[Path, Path], None], says: str
) -> None:
    own, local = tmp_path / 'an archive.tar', tmp_path / 'local disk'
    own.write_bytes(archive.read_bytes())
    command = PackedEnvironment(archive=str(own)).prepare(tmp_path)
    if damage is no_room:
        with small_disk(local) as mounted:
            if not mounted:
                pytest.skip('needs root, for a small disk')
            damage(own, local)
            found, said = run(command, local)
            assert [path.name for path in local.iterdir()] == ['filler']
    else:
        local.mkdir()
        damage(own, local)
        found, said = run(command, local)
    assert says in said
    assert ('is not used' in said) is bool(says)
    assert found == (sys.prefix if says else found)
    assert says or Path(found).parent == local


def unpack_nothing(local: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a node does that cannot use the archive."""
    return run_to_end(
        ['/bin/bash', str(SCRIPT), '/nonexistent', 'digest', str(local), 'echo', 'goes on'],
        more_env=environment,
    )


def test_a_folder_that_the_environment_names_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / 'precious').mkdir()
    done = unpack_nothing(tmp_path, here=str(tmp_path / 'precious'), why='because')
    assert done.stdout == 'goes on\n'
    assert '/nonexistent cannot be read' in done.stderr
    assert (tmp_path / 'precious').is_dir()


def test_nodes_that_share_a_folder_leave_each_others_environments_alone(tmp_path: Path) -> None:
    host, user = platform.node(), os.getuid()
    boot = Path('/proc/sys/kernel/random/boot_id').read_text().partition('-')[0]
    with subprocess.Popen(['true']) as ended:
        pass
    alive, dead = f'{os.getpid()}.aaaaaa', f'{ended.pid}.aaaaaa'
    names = {
        f'{user}@{host}@{boot}-{alive}': True,
        f'{user}@{host}@{boot}-{dead}': False,
        f'{user}@{host}@an0ther-{alive}': False,  # before the computer was started again
        f'{user}@{host}-2@{boot}-{dead}': True,
        f'{user}@elsewhere@{boot}-{dead}': True,
        f'{user}1@{host}@{boot}-{dead}': True,
    }
    for name in names:
        (tmp_path / f'freetrain-environment-{name}').mkdir()
    unpack_nothing(tmp_path)
    left = {path.name.removeprefix('freetrain-environment-') for path in tmp_path.iterdir()}
    assert left == {name for name, stays in names.items() if stays}


@pytest.mark.parametrize(
    ('mode', 'owner'), [(0o666, None), (0o620, None), pytest.param(0o600, 4321, marks=needs_root)]
)
def test_an_archive_others_can_change_is_refused(
    tmp_path: Path, mode: int, owner: int | None
) -> None:
    archive = tmp_path / 'environment.tar'
    archive.write_bytes(b'')
    archive.chmod(mode)
    if owner is not None:
        os.chown(archive, owner, -1)
    with pytest.raises(BadInput, match='Another user can change .*environment.tar'):
        PackedEnvironment(archive=str(archive)).prepare(tmp_path)


def test_environment_that_does_not_work_on_node_is_not_used(tmp_path: Path, prefix: Path) -> None:
    bare = tmp_path / 'bare'
    venv.create(bare, symlinks=True)
    (tmp_path / 'local').mkdir()
    command = PackedEnvironment(prefix=str(bare)).prepare(tmp_path)
    found, said = run(command, tmp_path / 'local')
    assert found == sys.prefix
    assert "No module named 'parsl_freetrain'" in said
    assert not list((tmp_path / 'local').iterdir())


def test_what_cannot_be_meant_is_refused() -> None:
    for settings, says in (
        ({'archive': 'a', 'prefix': 'b'}, 'an archive and a prefix; give'),
        ({'archive': '/nowhere.tar'}, "'/nowhere.tar' cannot be read; name a file"),
        ({'prefix': '/'}, '/ is no virtual environment and no conda environment'),
        ({'local': 'scratch'}, "local is 'scratch'; it must be the absolute path"),
        ({'locl': '/tmp'}, "no argument 'locl'; say local"),
    ):
        with pytest.raises(BadInput, match=says):
            PackedEnvironment(**settings)


def test_what_cannot_be_packed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / 'editable'
    venv.create(made, symlinks=True)
    site = next(made.glob('lib/python*/site-packages'))
    (site / 'editable.pth').write_text('/somewhere/src\n')
    with pytest.raises(BadInput, match=r'could not be packed into .* editable packages installed'):
        PackedEnvironment(prefix=str(made)).prepare(tmp_path)
    assert sorted(path.name for path in (tmp_path / 'environment').iterdir()) == []
    monkeypatch.setattr(packed_environment, 'find_spec', lambda name: None)
    with pytest.raises(BadInput, match=r'venv-pack, .* is not installed: pip install venv-pack2'):
        packer(made)

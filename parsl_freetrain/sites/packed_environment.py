"""A Python environment in one file, unpacked on nodes: many imports from one disk wait."""

import hashlib
import os
import shlex
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError, refuse
from parsl_freetrain.host.ownership import is_ours, refuse_foreign, refuse_replaceable

SCRIPT = Path(__file__).with_name('use_environment.sh')
FOLDER = 'environment'
_WHAT = 'folder of the packed environment'
_SAID = 500


class PackedEnvironment(Settings, frozen=True, kw_only=True):
    """Packs a Python environment once per run. Each node unpacks it when its block starts, and uses
    it instead of the one on the shared file system.

    If a node cannot unpack it, the node uses the shared environment, and its log says why.

    Attributes
    ----------
    archive
        A file that conda-pack or venv-pack has made; None: ``prefix`` is packed when the executor
        starts, into ``environment/`` of its checkpoint_dir, unless another user could replace that.
        This needs the extra ``pack``.
    prefix
        The environment to pack; None: that of this process. Packages that are installed in editable
        mode cannot be packed.
    local
        A folder on each node's own disk; None: TMPDIR there, or /tmp.
    """

    archive: str | None = None
    prefix: str | None = None
    local: str | None = None

    def __post_init__(self) -> None:
        if self.archive is not None and self.prefix is not None:
            raise BadInput(
                'PackedEnvironment was given an archive and a prefix; give the archive that is '
                'there, or the prefix to pack.'
            )
        if self.archive is not None and not os.access(self.archive, os.R_OK):
            raise BadInput(
                f'PackedEnvironment: the archive {self.archive!r} cannot be read; name a file that '
                'conda-pack or venv-pack has made.'
            )
        if self.prefix is not None:
            packer(Path(self.prefix))
        if self.local is not None and not os.path.isabs(self.local):
            must = "the absolute path of a folder on the nodes' own disks"
            refuse('PackedEnvironment: local', self.local, must)

    def prepare(self, checkpoint_dir: Path) -> str:
        """Pack the environment; returns what comes before a node's command, or raises."""
        folder = checkpoint_dir.absolute() / FOLDER
        try:
            if self.archive is not None:
                archive = Path(self.archive).absolute()
                _refuse_changeable(archive)
            else:
                refuse_replaceable(folder, _WHAT)
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                refuse_foreign(folder, _WHAT)
                archive = pack(Path(self.prefix or sys.prefix), folder / 'environment.tar')
            with archive.open('rb') as file:
                found = hashlib.file_digest(file, 'sha256').hexdigest()
        except OSError as error:
            raise FreeTrainError(
                f'The environment for the nodes could not be packed in {folder}: {error}.'
            ) from error
        # The script itself: nodes may not see our packages yet, and others could replace it.
        script = ['/bin/bash', '-c', SCRIPT.read_text(), SCRIPT.name]
        return shlex.join([*script, str(archive), found, self.local or ''])


def _refuse_changeable(archive: Path) -> None:
    """Refuse an archive that another user than root could change: nodes run what is in it."""
    refuse_replaceable(archive, 'archive')
    found = archive.stat()
    ours = found.st_uid == 0 or is_ours(found.st_uid, archive.parent)
    if not ours or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BadInput(
            f'Another user can change {archive} (owner {found.st_uid}, mode '
            f'{stat.S_IMODE(found.st_mode):04o}), and nodes would run what is in it: forbid that '
            '(chmod go-w), or give a copy of your own.'
        )


def packer(prefix: Path) -> str:
    if (prefix / 'conda-meta').is_dir():
        module = 'conda_pack'
    elif (prefix / 'pyvenv.cfg').is_file():
        module = 'venv_pack'
    else:
        raise BadInput(
            f'{prefix} is no virtual environment and no conda environment, so it cannot be packed: '
            'run from one, or give PackedEnvironment the archive of one.'
        )
    if find_spec(module) is None:
        raise BadInput(
            f'Packing {prefix} needs {module.replace("_", "-")}, which is not installed: '
            f'pip install {"conda-pack" if module == "conda_pack" else "venv-pack2"}.'
        )
    return module


def pack(prefix: Path, archive: Path) -> Path:
    """Pack an environment into a tar file, which is returned. Raises BadInput if it cannot be."""
    module = packer(prefix)
    partial = archive.with_name(f'.{archive.name}')
    main = f'from {module}.{"__main__" if module == "venv_pack" else "cli"} import main; main()'
    options = ['--prefix', str(prefix), '--output', str(partial), '--format', 'tar', '--force']
    done = subprocess.run(
        [sys.executable, '-P', '-c', main, *options, '--quiet'],
        # What it writes first goes beside the archive, not into a small /tmp.
        env={**os.environ, 'TMPDIR': str(archive.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        partial.unlink(missing_ok=True)
        said = ' '.join((done.stderr or done.stdout).split())[-_SAID:]
        raise BadInput(f'The environment {prefix} could not be packed into {archive}: {said}')
    partial.replace(archive)
    return archive

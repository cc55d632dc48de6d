"""``freetrain new``: writes a first script, and a site file for this machine."""

import re
import shlex
import shutil
import subprocess
from importlib.resources import files as files_of
from pathlib import Path
from typing import Annotated

import typer

from parsl_freetrain.core.model.errors import BadInput


def new(
    folder: Annotated[Path, typer.Argument(help='Where to write train.py and site.toml.')] = Path(),
) -> int:
    """Write a first script, train.py, and where there is Slurm or PBS a site file, site.toml.

    Slurm or PBS is asked for its partitions or queues. No file is overwritten.
    """
    site = _slurm() or _pbs()
    site_file = folder / 'site.toml'
    files = {folder / 'train.py': '', **({site_file: site} if site else {})}
    there = [str(path) for path in files if path.exists()]
    if there:
        raise BadInput(f'{" and ".join(there)} exists already; name another folder.')
    command = f'freetrain run {shlex.quote(str(folder / "train.py"))}'
    command += f' --site {shlex.quote(str(site_file))}' if site else ''
    files[folder / 'train.py'] = _template('train').format(command=command)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text)
    print(f'Wrote {" and ".join(map(str, files))}.')
    if site is None:
        print('There is no Slurm or PBS here: two slots of this computer play the nodes.')
    print(f'Next: {command}')
    return 0


def _template(name: str) -> str:
    return (files_of('parsl_freetrain.cli') / f'new_{name}.txt').read_text(encoding='utf-8')


def _slurm() -> str | None:
    """The site file for the default partition; None: Slurm does not answer."""
    lines = _answer('sinfo', '--noheader', '--format=%R|%l|%D|%P').splitlines()
    rows = [line.split('|') for line in lines if line.count('|') == 3]
    if not rows:
        return None
    default = next((row for row in rows if row[3].endswith('*')), rows[0])
    seen = dict.fromkeys(
        f'# {name}: {nodes} nodes, at most {limit}' for name, limit, nodes, _ in rows
    )
    settings = '\n'.join([*seen, f'partition = "{default[0]}"'])
    return _template('site').format(
        title='A partition of Slurm', page='slurm', table='slurm', settings=settings
    )


def _pbs() -> str | None:
    """The site file for the first execution queue; None: PBS does not answer."""
    pattern = r'^Queue: (\S+)\n(?:    .*\n)*?    queue_type = Execution'
    queues = re.findall(pattern, _answer('qstat', '-Q', '-f'), re.M)
    if not queues:
        return None
    settings = f'# Queues: {", ".join(queues)}\nqueue = "{queues[0]}"'
    return _template('site').format(
        title='A queue of PBS', page='pbs', table='pbspro', settings=settings
    )


def _answer(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ''
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ''
    return done.stdout if done.returncode == 0 else ''

"""The environment of the other systems: `.venv-versus`, beside the checkout's own."""

import shlex
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.versus.machine import PEERS, ROOT
from tests.support.programs import run_to_end

REQUIREMENTS = Path(__file__).with_name('requirements.txt')
PYTHON = PEERS / 'bin' / 'python'
_DONE = PEERS / 'installed.txt'


def install() -> None:
    """Make the environment unless it is there; what cannot be installed is left out, and why."""
    wanted = REQUIREMENTS.read_text()
    if _DONE.exists() and _DONE.read_text() == wanted:
        return
    subprocess.run([sys.executable, '-m', 'venv', str(PEERS)], check=True)
    for line in wanted.splitlines():
        if words := shlex.split(line, comments=True):
            pip = [str(PYTHON), '-m', 'pip', 'install', '--quiet']
            words = [*pip, '-c', str(ROOT / '.ci' / 'constraints.txt'), *words]
            done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                _reason(words[0]).write_text(done.stderr)
                print(f'{words[0]} cannot be installed: {_last(done.stderr)}', flush=True)
    _DONE.write_text(wanted)


def why_not(module: str) -> str:
    """Why a module cannot be used; empty if it can, or if none is named."""
    if not module:
        return ''
    done = run_to_end([str(PYTHON), '-c', f'import {module}'])
    if not done.returncode:
        return ''
    kept = [path for path in PEERS.glob('*.reason') if path.name.startswith(module)]
    return _last(kept[0].read_text() if kept else done.stderr)


def _reason(requirement: str) -> Path:
    return PEERS / f'{requirement.replace("/", "_")}.reason'


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), 'no reason given')

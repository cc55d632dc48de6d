"""An environment with Globus Compute: the tests' own, or ``test_in_its_environment.py``'s."""

import hashlib
import importlib.util
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).resolve().parents[2] / '.ci' / 'constraints-globus.txt'
INSTALL_S = 900
HERE = importlib.util.find_spec('globus_compute_endpoint') is not None

collect_ignore = ['test_in_its_environment.py'] if HERE else ['endpoint']


@pytest.fixture(scope='session')
def globus_python(pytestconfig: pytest.Config) -> Path:
    """The environment's Python; kept in pytest's cache. Skips where nothing can be installed."""
    assert pytestconfig.cache is not None
    key = hashlib.sha256(CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = pytestconfig.cache.mkdir('globus') / key
    if not (folder / 'complete').exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder)
        # What a test's own processes are known by must not stay with pip's.
        kept = {n: v for n, v in os.environ.items() if not n.startswith('FREETRAIN_TEST')}
        done = subprocess.run(
            # By the pip that is here; what is imported is compiled then, and no more.
            [
                *(sys.executable, '-m', 'pip', '--python', folder / 'bin' / 'python'),
                *('install', '--quiet', '--disable-pip-version-check', '--no-compile'),
                *('-c', CONSTRAINTS, 'globus-compute-endpoint'),
            ],
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        if done.returncode:
            pytest.skip(
                'needs Globus Compute, which cannot be installed here: '
                f'{done.stderr.strip()[-300:]}'
            )
        # Everything else comes from the environment of the tests; what both have, from this one.
        (packages,) = (folder / 'lib').glob('python*/site-packages')
        lines = [f'import site; site.addsitedir({path!r})\n' for path in site.getsitepackages()]
        (packages / 'zz-tests.pth').write_text(''.join(lines))
        (folder / 'complete').touch()
    return folder / 'bin' / 'python'

"""``--workers``: every test runs once, on a worker of its file's, and nothing is lost."""

import os
import re
import sys
from pathlib import Path

from tests.support.programs import run_to_end

CONFTEST = """
from pathlib import Path
import os
import pytest
from tests.support import workers

def pytest_addoption(parser):
    parser.addoption('--workers', type=int)

def pytest_runtestloop(session):
    files = {}
    for item in session.items:
        files.setdefault(item.path, []).append(item)
    units = list(files.values())
    workers.run(session, units, session.config.getoption('workers'), lambda: None)
    return True

@pytest.fixture(scope='session', autouse=True)
def of_the_session():
    yield
    if os.environ.get('AT_THE_END') == 'raise':
        raise ValueError('left behind')
    if os.environ.get('AT_THE_END') == 'die':
        os._exit(3)

@pytest.fixture(scope='module')
def of_the_file(request):
    Path(__file__).with_name('log').open('a').write(f'{request.path.name} {os.getpid()}\\n')
    return os.getpid()
"""
FILE = """
import pytest, warnings

@pytest.mark.parametrize('number', range(3))
def test_it(of_the_file, tmp_path, number):
    import os
    assert of_the_file == os.getpid()
    assert not list(tmp_path.iterdir())

def test_warning():
    warnings.warn('a warning of this test')
"""
BAD = """
import os, pytest

def test_good():
    pass

def test_bad():
    print('what it printed')
    assert 1 == 2

@pytest.mark.skip(reason='not now')
def test_skipped():
    pass
"""
DEADLY = """
import os

def test_before():
    pass

def test_deadly():
    os._exit(3)

def test_after():
    pass
"""


def pytest_in(folder: Path, *options: str, **environment: str) -> str:
    """What a session with two workers says."""
    done = run_to_end(
        [
            *(sys.executable, '-m', 'pytest', '-c', '/dev/null', '--rootdir', str(folder)),
            *('--workers', '2', '-rA', *options, str(folder)),
        ],
        cwd=folder,
        more_env={'COLUMNS': '200', 'PYTHONPATH': os.getcwd(), **environment},
    )
    return done.stdout + done.stderr


def test_each_test_runs_once_and_is_reported(tmp_path: Path) -> None:
    """What a worker that died did not run has failed."""
    (tmp_path / 'conftest.py').write_text(CONFTEST)
    for name in ('one', 'two', 'three'):
        (tmp_path / f'test_{name}.py').write_text(FILE)
    (tmp_path / 'test_bad.py').write_text(BAD)
    (tmp_path / 'test_deadly.py').write_text(DEADLY)
    said = pytest_in(tmp_path, '--durations=1', '--basetemp', str(tmp_path / 'temporary'))
    assert '3 failed, 14 passed, 1 skipped, 3 warnings' in said, said
    assert 'what it printed' in said and 'slowest 1 durations' in said
    assert 'UserWarning: a warning of this test' in said
    log = (tmp_path / 'log').read_text().split()
    assert sorted(log[::2]) == ['test_one.py', 'test_three.py', 'test_two.py']
    failed = re.findall(r'^FAILED \S+::(test_\w+)', said, re.MULTILINE)
    assert sorted(failed) == ['test_after', 'test_bad', 'test_deadly']
    assert 'the worker ended before the end of this test, status 3' in said
    last = pytest_in(tmp_path, '-x', '--last-failed', '-k', 'test_bad')
    assert '1 failed' in last and 'passed' not in last, last


def test_what_fails_at_the_end_of_a_worker_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / 'conftest.py').write_text(CONFTEST)
    (tmp_path / 'test_one.py').write_text(FILE)
    for how, words in (('raise', 'ValueError: left behind'), ('die', 'the worker ended before')):
        said = pytest_in(tmp_path, AT_THE_END=how)
        assert '4 passed, 1 warning, 1 error' in said and words in said, said

"""The checks in conftest.py find what a test leaves behind, and blame the test that left it."""

import re
import sys
from pathlib import Path

from tests.support.programs import run_to_end

CONFTEST = Path(__file__).with_name('conftest.py')

LEAKS = """
import os, pathlib, socket, subprocess, sys, threading, time

KEPT = []
SLEEP = [sys.executable, '-c', 'import time; time.sleep(300)']

def test_clean():
    subprocess.run([sys.executable, '-c', 'pass'], check=True)
    pathlib.Path('/proc/self/comm').read_text()

def test_process():
    KEPT.append(subprocess.Popen(SLEEP))

def test_orphan():
    code = f'import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True)'
    subprocess.run([sys.executable, '-c', code], check=True)

def test_thread():
    threading.Thread(target=time.sleep, args=(3,), name='forgotten').start()

def test_port():
    KEPT.append(socket.create_server(('127.0.0.1', 0)))

def test_home():
    pathlib.Path.home().joinpath('.forgotten').touch()

def test_runinfo():
    pathlib.Path(__file__).resolve().parent.parent.joinpath('runinfo').mkdir()

def test_run_dir(run_dir):
    pathlib.Path('runinfo').mkdir()

def test_going_away():
    subprocess.Popen(['sleep', '0.1'])
"""


def test_leaks_are_found(tmp_path: Path) -> None:
    tests = tmp_path / 'tests'
    tests.mkdir()
    text = CONFTEST.read_text()
    (tests / 'conftest.py').write_text(
        re.sub(r'^PATIENCE_S = .*', 'PATIENCE_S = 1.0', text, flags=re.MULTILINE)
    )
    (tests / 'test_leaks.py').write_text(LEAKS)
    done = run_to_end(
        [
            *(sys.executable, '-m', 'pytest', '-rE', '-c', '/dev/null'),
            *('--rootdir', str(tmp_path), str(tests)),
        ],
        cwd=tmp_path,
        more_env={'COLUMNS': '200'},
    )
    blamed = dict(
        re.findall(
            r'^ERROR tests/test_leaks.py::test_(\w+) - Failed: left behind ([\w ]+):',
            done.stdout,
            re.MULTILINE,
        )
    )
    assert blamed == {
        'process': 'processes',
        'orphan': 'processes',
        'thread': 'threads',
        'port': 'listening ports',
        'home': 'files outside its own folder',
        'runinfo': 'files outside its own folder',
    }, done.stdout + done.stderr
    assert '9 passed, 6 errors' in done.stdout

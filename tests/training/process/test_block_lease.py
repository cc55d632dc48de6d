"""The holder of the blocks, and a node that passes from one run to the next."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parsl_freetrain import BadInput
from parsl_freetrain.training.process import block_lease as lease
from parsl_freetrain.training.process.block_lease import read_holder, this_process, write_holder
from tests.support.programs import Program
from tests.support.waiting import LIMIT_S, under_load

JOB = 'TEST_JOB_ID'
EVIL = '{"run": "x", "host": "h", "pid": 1, "born": "1", "commands": {"17": "echo evil"}}'


@contextmanager
def node(holder: Path, command: str, wait_s: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    agent = [sys.executable, '-P', '-m', 'parsl_freetrain.training.process.node_agent']
    options = ['--holder', str(holder), '--job-variable', JOB, '--wait', f'{wait_s:g}']
    with Program(
        [*agent, *options, '/bin/sh', '-c', command],
        more_env={JOB: '17'},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until_it_waits(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    assert 'waiting' in process.stderr.readline()


def test_node_runs_what_next_holder_says_and_nothing_of_lost_run_beside_it(tmp_path: Path) -> None:
    file = tmp_path / 'holder.json'
    with node(file, 'sleep 600 & echo first $!') as process:
        assert process.stdout is not None
        left = int(process.stdout.readline().split()[1])
        until_it_waits(process)
        assert not Path(f'/proc/{left}/exe').exists(), 'what the lost run has left behind is ended'
        write_holder(file, this_process('second', {'17': 'echo second', '18': 'echo other'}))
        assert process.stdout.readline() == 'second\n'
        until_it_waits(process)  # the same holder is not served twice
        write_holder(file, this_process('third', {'17': 'echo third; exit 3'}))
        assert process.stdout.readline() == 'third\n'
        assert process.wait(LIMIT_S) == 3, 'a command that failed is no lost run'


def test_a_job_that_was_adopted_while_it_waited_begins_with_its_new_holder(tmp_path: Path) -> None:
    file = tmp_path / 'holder.json'
    write_holder(file, this_process('next', {'17': 'echo next; exit 4'}))
    with node(file, 'echo lost') as process:
        assert process.communicate(timeout=LIMIT_S)[0] == 'next\n'
        assert process.returncode == 4


def test_a_node_that_nobody_claims_ends(tmp_path: Path) -> None:
    file = tmp_path / 'holder.json'
    write_holder(file, this_process('next', {'18': 'echo mine'}))
    with node(file, 'echo lost', wait_s=0.2) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == 'lost\n'
        assert process.returncode == 0


def test_a_node_that_waits_gives_its_nodes_back_at_once(tmp_path: Path) -> None:
    with node(tmp_path / 'holder.json', 'true') as process:
        until_it_waits(process)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < under_load(7.0)


def test_the_file_is_private_whole_and_released_by_its_own_run_only(tmp_path: Path) -> None:
    file = tmp_path / 'holder.json'
    assert read_holder(file) is None
    write_holder(file, this_process('one', {'1': 'x'}))
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_holder(file) == this_process('one', {'1': 'x'})
    lease.release(file, 'another')
    assert file.exists()
    lease.release(file, 'one')
    assert list(tmp_path.iterdir()) == []


def test_what_others_may_have_written_is_refused_and_never_run(tmp_path: Path) -> None:
    file = tmp_path / 'holder.json'
    for content, mode, complaint in (
        (EVIL, 0o620, 'mode 0600'),
        (EVIL, 0o604, 'mode 0600'),
        ('{"run": "x"', 0o600, 'not what a run has written'),
        ('[]', 0o600, 'not what a run has written'),
    ):
        file.write_text(content)
        file.chmod(mode)
        with pytest.raises(BadInput, match=complaint):
            read_holder(file)
        assert lease.LeasedCommands(file, '17').claim() is None
    file.rename(tmp_path / 'real')
    file.symlink_to('real')
    with pytest.raises(BadInput, match='cannot be read'):
        read_holder(file)


def test_a_holder_lives_as_long_as_its_process(tmp_path: Path) -> None:
    file = tmp_path / 'holder.json'
    code = (
        'import sys; from pathlib import Path; '
        'from parsl_freetrain.training.process.block_lease import *; '
        'write_holder(Path(sys.argv[1]), this_process("other")); '
        'print("ready", flush=True); sys.stdin.read()'
    )
    with Program([sys.executable, '-c', code, file]) as process:
        assert process.said() == 'ready'
        other = read_holder(file)
        assert other is not None
        assert other.lives()
        process.kill()
        process.wait()
        assert not other.lives()
    assert this_process('mine').lives()

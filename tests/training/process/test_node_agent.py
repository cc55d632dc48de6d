"""The first process of a node, with real signals."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parsl_freetrain.host.leftovers import SHARED
from parsl_freetrain.training.process import node_agent
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import Notice
from tests.support import template
from tests.support.programs import Program, run_to_end
from tests.support.waiting import LIMIT_S

AGENT = [sys.executable, '-P', '-m', 'parsl_freetrain.training.process.node_agent']
# What a manager is to it: says its notice address, then lives until its input ends.
COMMAND = (
    'import os, signal, sys; print(os.environ["FREETRAIN_NODE_NOTICE"], '
    'signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, '
    'os.getpid(), flush=True); sys.stdin.read(); sys.exit(7)'
)


PATIENT = (
    'import sys; from parsl_freetrain.training.process import node_agent; '
    'node_agent._FAREWELL_S = 1e9; sys.exit(node_agent.main())'
)


# A manager's own names, and what it makes under them.
MANAGER = """
import multiprocessing
from parsl_freetrain.host.leftovers import own_names
if __name__ == '__main__':
    with own_names():
        context = multiprocessing.get_context('forkserver')
        with context.Manager() as shared:
            kept, semaphore = shared.dict(), context.Semaphore()
            print(multiprocessing.current_process()._config['tempdir'], flush=True)
            exec(COMMAND)
"""


@contextmanager
def running(patient: bool = False) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A node, its address, and its process id. A ``patient`` one waits for ever for results."""
    agent = [sys.executable, '-P', '-c', PATIENT] if patient else AGENT
    with Program([*agent, sys.executable, '-c', COMMAND]) as process:
        try:
            name, ignores, pid = process.said().split()
            assert ignores == 'True'
            yield process, name, int(pid)
        finally:
            process.kill()


def test_torch_is_imported_beside_the_command_and_ends_with_the_node(tmp_path: Path) -> None:
    command = f'import os; print(os.environ["{node_agent.TEMPLATE_VARIABLE}"], flush=True); input()'
    with Program(
        [*AGENT, '--template', tmp_path / 'logs', sys.executable, '-c', command],
        more_env={node_agent.TEMPLATE_VARIABLE: 'of-a-node-elsewhere'},
    ) as process:
        its_own = process.said()
        log = tmp_path / 'server.log'
        server = ForkClient.start(f'node-of-{its_own}', process.pid, str(log), its_own)
        server.wait_ready(LIMIT_S)
        assert server._process is None, 'it was forked, and has not imported torch itself'
        assert server.pid is not None
        process.stdin.write('\n')
        process.stdin.flush()
        assert process.wait(LIMIT_S) == 0
        assert gone(server.pid)
    [its_log] = (tmp_path / 'logs').iterdir()
    assert its_log.name == f'{its_own}.log'


def test_nodes_of_one_computer_may_share_a_template(tmp_path: Path) -> None:
    shared = template.for_nodes()
    command = f'import os; print(os.environ["{node_agent.TEMPLATE_VARIABLE}"])'
    agent = [*AGENT, '--template', tmp_path / 'logs', sys.executable, '-c', command]
    done = run_to_end(agent, more_env=shared, check=True)
    assert done.stdout.strip() == shared[node_agent.TEMPLATE_VARIABLE]
    assert not (tmp_path / 'logs').exists()


def test_node_that_is_left_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, temporary = tmp_path / 'manager.py', tmp_path / 'tmp'
    script.write_text(f'COMMAND = {COMMAND!r}\n{MANAGER}')
    temporary.mkdir()
    its_own = {'TMPDIR': str(temporary)}
    with Program([*AGENT, sys.executable, script], more_env=its_own) as process:
        folder = Path(process.said())
        name, _, pid = process.said().split()
        # Nodes of other tests have theirs there, too.
        its = {path for path in SHARED.iterdir() if folder.name in path.name}
        assert len(its) > 1
        monkeypatch.setenv(node_agent.NOTICE_VARIABLE, name)
        node_agent.leave()
        assert process.wait(LIMIT_S) == 0
    assert gone(int(pid))
    assert not [path for path in its if path.exists()]
    assert not list(temporary.iterdir())


@contextmanager
def member(name: str) -> Iterator[Channel[Notice]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(node_agent.NOTICE_VARIABLE, name)
        channel = node_agent.listen_for_notices()
    assert channel is not None
    try:
        yield channel
    finally:
        channel.close()


def gone(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 20)[0])
    finally:
        os.close(fd)


def test_a_member_is_told_and_the_node_waits_for_it() -> None:
    with running() as (process, name, pid), member(name) as channel:
        channel.send_bytes(b'{"kind": "nonsense"}')  # a member has nothing to say
        for receiver in (process.pid, pid):  # a scheduler signals all of them
            os.kill(receiver, signal.SIGTERM)
        assert channel.poll(LIMIT_S)
        assert channel.recv() == Notice('SIGTERM')
        with member(name) as late:
            assert late.poll(LIMIT_S)
            assert late.recv() == Notice('SIGTERM')
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * node_agent._FAREWELL_S)
        channel.close()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        assert gone(pid)


@pytest.mark.parametrize('number', [0, signal.SIGTERM])
def test_a_node_whose_results_have_arrived_ends_at_once_when_no_member_is_at_work(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(patient=True) as (process, name, pid):
        with member(name) as channel:
            process.send_signal(number)
            monkeypatch.setenv(node_agent.NOTICE_VARIABLE, name)
            node_agent.leave()
            channel.send_bytes(b'{"kind": "nonsense"}')  # a member has nothing to say
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        assert process.wait(LIMIT_S) == (128 + number if number else 0)
        assert gone(pid)


def test_a_warning_ends_nothing_and_the_status_of_the_command_is_passed_on() -> None:
    with running() as (process, name, _), member(name) as channel:
        process.send_signal(signal.SIGUSR1)
        assert channel.poll(LIMIT_S)
        assert channel.recv() == Notice('SIGUSR1')
        channel.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 7


def test_the_command_does_not_outlive_it() -> None:
    with running() as (process, _, pid):
        process.kill()
        process.wait()
        assert gone(pid)


def test_without_a_command_it_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert node_agent.main([]) == 2
    assert 'COMMAND' in capsys.readouterr().err


def test_outside_of_a_node_nobody_gives_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(node_agent.NOTICE_VARIABLE, raising=False)
    assert node_agent.listen_for_notices() is None
    monkeypatch.setenv(node_agent.NOTICE_VARIABLE, 'parsl-freetrain-nobody')
    assert node_agent.listen_for_notices() is None

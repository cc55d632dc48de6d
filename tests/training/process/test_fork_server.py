"""Fork servers: one per name, ranks that start and end, none that outlives its owner."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain import FragmentContext, FreeTrainError
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import StopTraining
from tests.support.programs import run_to_end
from tests.support.ranks import KILLED, Ranks, ended, order, ranks, running_fork_server
from tests.support.template import name as name_of_template
from tests.support.template import start_by_itself
from tests.support.waiting import LIMIT_S, wait_until


def forever(ctx: FragmentContext) -> None:
    import os
    import signal

    if os.fork() == 0:  # as a worker of a data loader
        while True:
            signal.pause()
    print('here')
    while True:
        signal.pause()


def leaves_behind(ctx: FragmentContext) -> None:
    """A process in another session, whose parent has ended."""
    import signal
    import subprocess

    shell = 'exec 3>&1 >/dev/null 2>&1; sleep 1000 3>&- & echo left $! >&3'
    subprocess.run(['/bin/sh', '-c', shell], start_new_session=True, check=True)
    while True:
        signal.pause()


def waits(ctx: FragmentContext) -> None:
    import signal

    while True:
        signal.pause()


def look_around(ctx: FragmentContext) -> None:
    import importlib
    import json
    import os
    import sys
    import tempfile
    import time

    found = {
        'cwd': os.getcwd(),
        'tmp': tempfile.gettempdir(),
        'zone': time.tzname[0],
        'new': os.environ.get('NEW_HERE'),
        'secret': os.environ.get('OF_THE_TEMPLATE'),
        'cpus': sorted(os.sched_getaffinity(0)),
        'module': importlib.import_module('only_of_the_asker').WHO,
        'threads': os.environ.get('OMP_NUM_THREADS'),
        'numpy_threads': os.environ['OPENBLAS_NUM_THREADS'],
        'order_of_sets': os.environ['PYTHONHASHSEED'],
        'path': os.environ['PYTHONPATH'].split(':') == sys.path,
    }
    raise LookupError(json.dumps(found))


def stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process; empty if there is not even a zombie."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def runs(pid: int) -> bool:
    return (stat(pid) or 'Z')[0] not in 'ZX'


def session_of(leader: int) -> set[int]:
    """The processes of a session that run."""
    pids = {int(entry) for entry in os.listdir('/proc') if entry.isdigit()}
    return {pid for pid in pids if runs(pid) and int((stat(pid) or [''] * 3 + ['0'])[3]) == leader}


def open_things(pid: int) -> set[str]:
    """Sockets and processes that a process holds open."""
    found = set()
    for fd in Path(f'/proc/{pid}/fd').iterdir():
        target = os.readlink(fd)
        if target.startswith('socket:'):
            found.add(target)
        elif 'pidfd' in target:
            info = Path(f'/proc/{pid}/fdinfo/{fd.name}').read_text()
            found.add(next(line for line in info.splitlines() if line.startswith('Pid:')))
    return found


def fresh() -> str:
    return f'tests-{secrets.token_hex(8)}'


@pytest.fixture
def processes() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Makes processes that do nothing, to be owners."""
    made: list[subprocess.Popen[bytes]] = []

    def make() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']))
        return made[-1]

    yield make
    for process in made:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope='module')
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('OF_THE_TEMPLATE', 'not for others')
        started = start_by_itself(
            fresh(), os.getpid(), str(tmp_path_factory.mktemp('template') / 'fork_server.log')
        )
    try:
        started.wait_ready(LIMIT_S)
        yield started
    finally:
        started.stop()


def test_forked_parents_depend_on_their_owners_alone(
    tmp_path: Path, processes: Callable[[], subprocess.Popen[bytes]]
) -> None:
    submitter, one_node, other_node = processes(), processes(), processes()
    template = start_by_itself(fresh(), submitter.pid, str(tmp_path / 'template.log'))
    name, other_name = fresh(), fresh()
    # All at once, before the template has imported torch, and one of them twice.
    one, same = (
        ForkClient.start(name, one_node.pid, str(tmp_path / 'one.log'), template.name)
        for _ in range(2)
    )
    other = ForkClient.start(other_name, other_node.pid, str(tmp_path / 'other.log'), template.name)
    gangs: list[Ranks] = []
    try:
        for parent in (one, same, other, template):
            parent.wait_ready(LIMIT_S)
        assert one.pid == same.pid
        assert one.pid is not None and other.pid is not None and template.pid is not None
        assert len({one.pid, other.pid, template.pid}) == 3
        for parent in (one, other):
            pids = template.pid, parent.pid, parent.pid
            assert tuple(map(int, stat(parent.pid or 0)[1:4])) == pids
            assert Path(parent.log).stat().st_mode & 0o777 == 0o600
            gangs.append(Ranks(parent, order(tmp_path), 1, tmp_path / parent.name, forever))
        rank, other_rank = (gang.ranks[0].process.pid for gang in gangs)
        for log in (gang.ranks[0].log for gang in gangs):
            wait_until(log.exists, 'the rank does not start')
            wait_until(lambda log=log: 'here' in log.read_text(), 'the rank does not run')  # type: ignore[misc]
        # The template and the nodes share nothing. (A server and its rank share the rank's
        # channel.)
        of_template, of_one, of_other = map(open_things, (template.pid, one.pid, other.pid))
        for things, others in ((of_template, of_one), (of_template, of_other), (of_one, of_other)):
            assert things
            assert not things & others
        assert open_things(rank) <= of_one
        assert open_things(other_rank) <= of_other
        # A terminal's and a scheduler's signals to the template do no harm.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(template.pid, number)
        # A node dies: its ranks and what they have forked go; no zombie stays with the template.
        one_session = session_of(one.pid)
        assert len(one_session) == 3
        end(one_node)
        wait_until(lambda: not stat(one.pid or 0), 'a server outlives its owner, or is a zombie')
        wait_until(lambda: not any(map(runs, one_session)), 'a rank outlives its server')
        assert runs(other_rank)
        # The submitter dies: the template goes, the servers stay.
        other_session = session_of(other.pid)
        assert len(other_session) == 3
        end(submitter)
        wait_until(lambda: not runs(template.pid or 0), 'the template outlives its owner')
        other.wait_ready(LIMIT_S)
        (found,) = ended(other, order(tmp_path), 1, tmp_path / 'more', look_around)
        assert "No module named 'only_of_the_asker'" in found.error.message
        assert all(map(runs, other_session))
        end(other_node)
        wait_until(lambda: not any(map(runs, other_session)), 'a node outlives its manager')
    finally:
        for gang in gangs:
            gang.close()
        for parent in (one, same, other, template):
            parent.stop()


def test_a_template_that_dies_before_it_has_answered_is_done_without(
    tmp_path: Path, processes: Callable[[], subprocess.Popen[bytes]]
) -> None:
    template = start_by_itself(fresh(), processes().pid, str(tmp_path / 'template.log'))
    assert template._process is not None
    template._process.send_signal(signal.SIGSTOP)
    name, owner = fresh(), processes().pid
    parent = ForkClient.start(name, owner, str(tmp_path / 'fork_server.log'), template.name)
    template._process.kill()
    template._process.wait()
    late = ForkClient.start(name, owner, str(tmp_path / 'fork_server.log'), template.name)
    try:
        parent.wait_ready(LIMIT_S)
        late.wait_ready(LIMIT_S)
        assert parent.pid is not None
        assert (late.pid, int(stat(parent.pid)[1])) == (parent.pid, os.getpid())
    finally:
        parent.stop()
        late.stop()


def ask(template: ForkClient, folder: Path, owner_pid: int, **env: str) -> dict[str, Any]:
    """Ask from another process and environment; what a rank finds, and its server's parent."""
    folder.mkdir()
    modules = folder / 'modules'
    modules.mkdir()
    (modules / 'only_of_the_asker.py').write_text(f'WHO = {folder.name!r}')
    name, log = fresh(), 'fork_server.log'
    program = f"""
import os, sys
sys.path.insert(0, 'modules')
os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})
from parsl_freetrain.training.process.fork_client import ForkClient
parent = ForkClient.start({name!r}, {owner_pid}, {log!r}, {template.name!r})
parent.wait_ready({LIMIT_S})
stat = open(f'/proc/{{parent.pid}}/stat').read().rpartition(')')[2].split()
print(parent.pid, stat[1], os.getpid(), flush=True)
os._exit(0)
"""
    environment = {k: v for k, v in os.environ.items() if k != 'OF_THE_TEMPLATE'}
    own = {'PYTHONPATH': str(Path(__file__).parents[3]), 'TMPDIR': str(folder)}
    command = [sys.executable, '-c', program]
    answer = run_to_end(command, cwd=folder, env={**environment, **own, **env})
    assert answer.returncode == 0, answer.stderr
    pid, ppid, asker = map(int, answer.stdout.split())
    assert (folder / log).exists()
    server = ForkClient(name, str(folder / log))
    (outcome,) = ended(server, order(folder), 1, folder / 'ranks', look_around)
    return {
        **json.loads(outcome.error.message),
        'pid': pid,
        'forked': ppid == template.pid,
        'own': ppid == asker,
    }


def test_a_forked_parent_is_as_if_the_asker_had_started_it(
    template: ForkClient, tmp_path: Path, processes: Callable[[], subprocess.Popen[bytes]]
) -> None:
    owner = processes()
    given = {'NEW_HERE': 'yes', 'TZ': 'XYZ-3'}
    found = ask(template, tmp_path / 'node', owner.pid, **given)
    own = ask(template, tmp_path / 'other', owner.pid, **given, OMP_NUM_THREADS='3')
    assert found.pop('forked') and not found.pop('own')
    # What cannot be taken over by a process that has started is a reason to start one.
    assert own.pop('own') and not own.pop('forked')
    assert 'OMP_NUM_THREADS is' in Path(template.log).read_text()
    for node, said in (('node', found), ('other', own)):
        assert runs(said.pop('pid'))
        assert said.pop('threads') == ('3' if node == 'other' else os.environ['OMP_NUM_THREADS'])
        # One that Python has started has the standard library twice.
        assert said.pop('path') or node == 'other'
        assert said == {
            'cwd': str(tmp_path / node),
            'tmp': str(tmp_path / node),
            'zone': 'XYZ',
            'new': 'yes',
            'secret': None,
            'cpus': [min(os.sched_getaffinity(0))],
            'module': node,
            'numpy_threads': '1',
            'order_of_sets': '0',
        }


def test_who_does_not_wait_any_more_gets_none(template: ForkClient, tmp_path: Path) -> None:
    assert template.pid is not None
    os.kill(template.pid, signal.SIGSTOP)
    try:
        log = str(tmp_path / 'fork_server.log')
        gone = ForkClient.start(fresh(), os.getpid(), log, template.name)
        gone.stop()
    finally:
        os.kill(template.pid, signal.SIGCONT)
    with pytest.raises(FreeTrainError, match='does not listen'):
        # A template answers in order, so what was asked before 'ready' here was dealt with.
        template.wait_ready(LIMIT_S)
        gone.wait_ready(0.1)


def test_what_a_rank_needs_is_imported_before_the_rank_is_forked() -> None:
    """For its seed, and to know which checkpoints are kept."""
    program = (
        'import importlib, sys\n'
        'from parsl_freetrain.training.process import fork_server\n'
        'for module in fork_server._TO_IMPORT:\n'
        '    importlib.import_module(module)\n'
        'there = set(sys.modules)\n'
        'from parsl_freetrain.training.data.loader import seed_everything\n'
        'seed_everything(7)\n'
        'import msgspec.json\n'
        'from parsl_freetrain import Checkpoints\n'
        'assert msgspec.json.decode(b"{}", type=Checkpoints).retention.last == 3\n'
        'print(*(set(sys.modules) - there))\n'
    )
    done = run_to_end([sys.executable, '-P', '-c', program], check=True)
    assert done.stdout.split() == []


def test_an_owner_that_is_gone_already(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, '-c', ''])
    process.wait()
    log, own = str(tmp_path / 'fork_server.log'), secrets.token_hex(8)
    parent = ForkClient.start(own, process.pid, log, name_of_template())
    with pytest.raises(FreeTrainError, match='ended'):
        parent.wait_ready(60)


def test_a_failed_parent_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'torch.py').write_text('raise ImportError("no torch today")')
    monkeypatch.syspath_prepend(tmp_path)
    parent = ForkClient.start(secrets.token_hex(8), os.getpid(), str(tmp_path / 'fork_server.log'))
    with pytest.raises(FreeTrainError, match=r'fork_server\.log(.|\n)*no torch today'):
        parent.wait_ready(60)
    parent.stop()
    assert (tmp_path / 'fork_server.log').stat().st_mode & 0o777 == 0o600


def test_the_end_of_the_parent_is_the_end_of_its_ranks(tmp_path: Path) -> None:
    with running_fork_server(tmp_path) as parent:
        assert parent.pid is not None
        with ranks(parent, order(tmp_path), 1, tmp_path, waits) as gang:
            os.kill(parent.pid, signal.SIGTERM)  # a notice, which goes to all processes
            parent.wait_ready(LIMIT_S)
            os.kill(parent.pid, signal.SIGKILL)
            wait_until(lambda: not runs(gang.ranks[0].process.pid))
            with pytest.raises(EOFError):
                gang.run()
        with pytest.raises(FreeTrainError, match='does not listen'):
            parent.launch(order(tmp_path), gang.ranks[0].place, b'', {})


@pytest.mark.parametrize('killed', ['rank', 'fork server'])
def test_what_a_killed_rank_has_started_ends(
    template: ForkClient,
    tmp_path: Path,
    processes: Callable[[], subprocess.Popen[bytes]],
    killed: str,
) -> None:
    server = ForkClient.start(fresh(), processes().pid, str(tmp_path / 'log'), template.name)
    server.wait_ready(LIMIT_S)
    with ranks(server, order(tmp_path), 1, tmp_path, leaves_behind) as gang:
        log, rank = gang.ranks[0].log, gang.ranks[0].process.pid
        wait_until(lambda: log.exists() and 'left' in log.read_text(), 'it does not start one')
        left = int(log.read_text().partition('left')[2].split()[0])
        assert runs(left)
        os.kill(rank if killed == 'rank' else server.pid or 0, signal.SIGKILL)
        wait_until(lambda: not runs(left), 'what a rank has started outlives it')


def test_a_rank_nobody_listens_to_is_ended(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = Ranks(fork_server, order(tmp_path), 1, tmp_path, waits)
    gang.close()
    wait_until(lambda: not runs(gang.ranks[0].process.pid))


def test_kill_is_reported(fork_server: ForkClient, tmp_path: Path) -> None:
    with ranks(fork_server, order(tmp_path), 1, tmp_path, waits) as gang:
        gang.ranks[0].process.kill()
        assert gang.run() == [KILLED]
        assert gang.ranks[0].status == -signal.SIGKILL
        with pytest.raises(EOFError):
            gang.ranks[0].process.recv()
        assert not gang.ranks[0].process.send(StopTraining('too late'))
        gang.ranks[0].process.kill()

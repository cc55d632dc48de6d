"""A test machine with a batch scheduler, in a folder: its commands load, advance and save its state
under a lock; jobs are processes (``batch_job.py``), those of others hold nodes only.
"""

import fcntl
import importlib
import json
import os
import pwd
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BLOCK_PRIORITY = -1024
LAUNCHERS = ('aprun', 'blaunch')  # they start what a job runs, and ask no scheduler
WAITING, RUNNING, ENDING, OVER = 'waiting', 'running', 'ending', 'over'
State = dict[str, Any]
Job = dict[str, Any]


class Machine:
    """The machine in ``folder``, used by tests and by the machine's commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, nodes: dict[str, dict[str, Any]], queues: dict[str, dict[str, Any]]) -> None:
        """Nodes with their attributes, queues with their limits ``most``, ``longest_s``."""
        (self.folder / 'jobs').mkdir(parents=True)
        state = {'next': 1, 'nodes': nodes, 'queues': queues}
        self._save({**state, 'jobs': {}, 'reservations': [], 'faults': {}})

    @contextmanager
    def state(self) -> Iterator[State]:
        """The state, after the scheduler has been brought up to date; changes are saved."""
        with (self.folder / 'lock').open('w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state: State = json.loads((self.folder / 'state.json').read_text())
            self._advance(state)
            yield state
            self._advance(state)
            self._save(state)

    def _save(self, state: State) -> None:
        part = self.folder / 'state.part'
        part.write_text(json.dumps(state))
        part.replace(self.folder / 'state.json')

    def submit(self, state: State, **job: Any) -> str:
        """Add a job to the queue; return its number."""
        number = str(state['next'])
        state['next'] += 1
        usual = {'name': 'job', 'user': 'eve', 'queue': next(iter(state['queues'])), 'priority': 0}
        none = dict.fromkeys(('seconds', 'script', 'start', 'exit', 'planned', 'account'))
        own = {'walltime_s': 600.0, 'state': WAITING, 'names': [], 'how': ''}
        state['jobs'][number] = {**usual, **none, **own, **job}
        return number

    def end(self, state: State, number: str, how: str) -> None:
        """Remove a job from the machine or the queue."""
        job = state['jobs'][number]
        if job['state'] == WAITING:
            job.update(state=OVER, how=how)
        elif job['state'] == RUNNING:
            job.update(state=ENDING, how=how)
            if job['script'] is not None:
                (self.folder / 'jobs' / f'{number}.end').touch()

    def _advance(self, state: State) -> None:
        now = time.time()
        for number, job in state['jobs'].items():
            if job['state'] in (RUNNING, ENDING):
                self._progress(state, number, job, now)
        free = {name for name, node in state['nodes'].items() if node.get('up', True)}
        free -= on_nodes(state).keys()
        windows = dict.fromkeys(state['nodes'], float('inf'))
        for reserved in state['reservations']:
            for name in reserved['nodes'] if reserved['end'] > now else ():
                windows[name] = min(windows[name], reserved['start'])
        busy = {n: job['start'] + job['walltime_s'] for n, (_, job) in on_nodes(state).items()}
        for number in sorted(state['jobs'], key=lambda n: (-state['jobs'][n]['priority'], int(n))):
            job = state['jobs'][number]
            if job['state'] == WAITING:
                self._consider(state, number, job, free, windows, busy, now)

    def _progress(self, state: State, number: str, job: Job, now: float) -> None:
        if job['script'] is None:
            if job['state'] == ENDING or now >= job['start'] + job['seconds']:
                job.update(state=OVER, exit=271 if job['state'] == ENDING else 0)
            return
        ended = self.folder / 'jobs' / f'{number}.exit'
        if ended.exists():
            code = int(ended.read_text())
            ended.unlink()
            (self.folder / 'jobs' / f'{number}.end').unlink(missing_ok=True)
            job.update(state=OVER, exit=code)
        elif job['state'] == RUNNING and now >= job['start'] + job['walltime_s']:
            self.end(state, number, 'timeout')

    def _consider(
        self,
        state: State,
        number: str,
        job: Job,
        free: set[str],
        windows: dict[str, float],
        busy: dict[str, float],
        now: float,
    ) -> None:
        """Start a waiting job, or plan it; planned jobs constrain the later ones."""
        job['planned'] = None
        walltime_s, nodes = job['walltime_s'], state['nodes']
        lasting = [name for name in free if now + walltime_s <= windows[name]]
        fitting = sorted(name for name in lasting if self._suits(nodes[name], job))
        if len(fitting) >= job['nodes']:
            names = fitting[: job['nodes']]
            free -= set(names)
            self._start(state, number, job, names, now)
            return
        if job['priority'] > BLOCK_PRIORITY:
            up = [name for name, node in state['nodes'].items() if node.get('up', True)]
            chosen = sorted(up, key=lambda n: (max(now, busy.get(n, now)), n))[: job['nodes']]
            if len(chosen) == job['nodes']:
                start = max(max(now + 1, busy.get(name, now)) for name in chosen)
                job['planned'] = {'start': start, 'names': chosen}
                for name in chosen:
                    windows[name] = min(windows[name], start)
                    busy[name] = start + job['walltime_s']

    @staticmethod
    def _suits(node: dict[str, Any], job: Job) -> bool:
        wanted = job.get('wants') or {}
        return all(str(node.get('has', {}).get(key)) == value for key, value in wanted.items())

    def _start(self, state: State, number: str, job: Job, names: list[str], now: float) -> None:
        job.update(state=RUNNING, names=names, start=now)
        if job['script'] is None:
            job['seconds'] = job['seconds'] if job['seconds'] is not None else job['walltime_s']
            return
        folder = self.folder / 'jobs'
        (folder / f'{number}.nodes').write_text('\n'.join(names) + '\n')
        ends = {'exit': str(folder / f'{number}.exit'), 'end': str(folder / f'{number}.end')}
        environment = {'PATH': f'{self.folder / "bin"}:{os.environ["PATH"]}'}
        environment |= self._environment(number, job, now)
        environment['MACHINE_JOB'] = f'{self.folder}:{number}'
        order = {name: job.get(name) for name in ('script', 'out', 'err', 'log')}
        order |= {**ends, 'environment': environment}
        (folder / f'{number}.order').write_text(json.dumps(order))
        daemon = ROOT / 'tests' / 'support' / 'batch_job.py'
        nowhere: Any = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)
        words = [sys.executable, str(daemon), str(folder / f'{number}.order')]
        process = subprocess.Popen(words, start_new_session=True, **nowhere)
        process.returncode = 0  # it outlives this process

    def _environment(self, number: str, job: Job, now: float) -> dict[str, str]:
        nodes = str(self.folder / 'jobs' / f'{number}.nodes')
        start, end = int(now), int(now + job['walltime_s'])
        times = {'COBALT_STARTTIME': str(start), 'COBALT_ENDTIME': str(end)}
        cobalt = {'COBALT_JOBID': number, 'COBALT_NODEFILE': nodes, **times}
        lsf = {'LSB_JOBID': number, 'LSB_HOSTS': ' '.join(job['names'])}
        return {'MACHINE_NODEFILE': nodes, **cobalt, **lsf}


Command = Callable[[Machine, list[str]], int]


def run_command(
    folder: Path, name: str, arguments: Sequence[str], commands: Mapping[str, Command], login: str
) -> int:
    """Be one of the machine's commands, with the configured fault."""
    if name == 'hostname':
        print(os.environ.get('MACHINE_NODE', login))
        return 0
    machine = Machine(folder)
    if name not in LAUNCHERS:
        with machine.state() as state:
            fault = state['faults'].get(name, state['faults'].get('all'))
        if fault == 'hang':
            time.sleep(3600)
        if fault is not None:
            return complain(fault['says'], fault['status'])
    return commands[name](machine, list(arguments))


def complain(words: str, status: int) -> int:
    print(words, file=sys.stderr)
    return status


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def clock(seconds: float) -> str:
    whole = int(seconds)
    return f'{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}'


def on_nodes(state: State) -> dict[str, tuple[str, Job]]:
    """The number and the job that each busy node has."""
    going = [(n, job) for n, job in state['jobs'].items() if job['state'] in (RUNNING, ENDING)]
    return {name: (number, job) for number, job in going for name in job['names']}


def directives(script: str, prefix: str) -> list[str]:
    """The words of the options in a batch script."""
    lines = Path(script).read_text().splitlines()
    ours = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return [word for line in ours for word in shlex.split(line)]


def install(machine: Machine, module: str) -> Path:
    """Write the commands of a module beside this one into the machine's folder ``bin``."""
    found = importlib.import_module(f'tests.support.{module}')
    folder = machine.folder / 'bin'
    folder.mkdir()
    for name in (*found.COMMANDS, 'hostname'):
        program = folder / name
        program.write_text(
            f'#!{sys.executable} -E\nimport sys\nfrom pathlib import Path\nsys.path[:0] '
            f'= [{str(ROOT)!r}]\n'
            f'from tests.support.{module} import COMMANDS, LOGIN\n'
            f'from tests.support.batch_machine import run_command\n'
            f'sys.exit(run_command(Path({str(machine.folder)!r}), {name!r}, sys.argv[1:], '
            f'COMMANDS, LOGIN))\n'
        )
        program.chmod(0o700)
    return folder

"""qsub, qstat, qdel, pbsnodes, pbs_rstat and mpiexec of a test machine, after the PBS Reference
Guide.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.support.batch_launch import launch
from tests.support.batch_machine import (
    ENDING,
    OVER,
    RUNNING,
    WAITING,
    Command,
    Job,
    Machine,
    State,
    clock,
    complain,
    directives,
    on_nodes,
    user,
)

LOGIN, SERVER = 'login1', 'pbs'


def qsub(machine: Machine, arguments: list[str]) -> int:
    *_, script = arguments
    parser = argparse.ArgumentParser()
    for option in ('-N', '-o', '-e', '-k', '-W', '-q', '-A', '-p', '-r'):
        parser.add_argument(option)
    parser.add_argument('-l', action='append', default=[])
    given = parser.parse_args(directives(script, '#PBS '))
    resources: dict[str, str] = {}
    for text in given.l:
        for pair in [text] if text.startswith('select') else text.split(','):
            name, _, value = pair.partition('=')
            resources[name] = value
    nodes, *chunk = resources['select'].split(':')
    with machine.state() as state:
        queue = state['queues'].get(given.q)
        if queue is None:
            return complain('qsub: Unknown queue', 170)
        if queue.get('needs_account') and not given.A:
            return complain('qsub: Job rejected by all possible destinations: no account (-A)', 1)
        if not queue.get('least', 1) <= int(nodes) <= queue.get('most', 10_000):
            return complain('qsub: Job violates queue and/or server resource limits', 188)
        longest = duration(resources.get('max_walltime', resources.get('walltime', '01:00:00')))
        if longest > queue.get('longest_s', 1e9):
            return complain('qsub: Job violates queue and/or server resource limits', 188)
        number = machine.submit(
            state,
            name=given.N,
            user=user(),
            queue=given.q,
            priority=int(given.p or 0),
            nodes=int(nodes),
            walltime_s=longest,
            least_s=duration(resources['min_walltime']) if 'min_walltime' in resources else None,
            script=keep(machine, script),
            out=given.o,
            err=given.e,
            rerun=given.r == 'y',
            account=given.A,
            wants={
                key: value
                for key, value in (part.split('=') for part in chunk)
                if key not in ('ncpus', 'ngpus')
            },
        )
    print(f'{number}.{SERVER}')
    return 0


def keep(machine: Machine, script: str) -> str:
    """PBS runs a copy of the script as it was at submission."""
    copy = machine.folder / 'jobs' / f'{time.time_ns()}.sh'
    copy.write_text(Path(script).read_text())
    return str(copy)


def duration(text: str) -> float:
    hours, minutes, seconds = (int(part) for part in text.split(':'))
    return float(3600 * hours + 60 * minutes + seconds)


def qstat(machine: Machine, arguments: list[str]) -> int:
    if arguments == ['--version']:
        print('pbs_version = 2022.1.1')
        return 0
    flags = [word for word in arguments if word.startswith('-')]
    wanted = [
        word.split('.')[0] for word in arguments if not word.startswith('-') and word != 'json'
    ]
    with machine.state() as state:
        if '-Q' in flags:
            return show(
                {'Queue': {name: queue_of(queue) for name, queue in state['queues'].items()}}
            )
        status, found = 0, {}
        for number in wanted or state['jobs']:
            job = state['jobs'].get(number)
            if job is None:
                status = complain(f'qstat: Unknown Job Id {number}.{SERVER}', 153)
            elif job['state'] == OVER and '-x' not in flags:
                status = (
                    complain(
                        f'qstat: {number}.{SERVER} Job has finished, use -x or -H to '
                        'obtain historical job information',
                        35,
                    )
                    if wanted
                    else status
                )
            elif job['state'] == OVER and 'no_history' in state['faults']:
                return complain('qstat: PBS is not configured to maintain job history', 36)
            else:
                found[number] = job
        if '-F' not in flags:
            for number, job in found.items():
                print(
                    f'Job Id: {number}.{SERVER}\n    Job_Name = {job["name"]}\n    '
                    f'Resource_List.walltime = {clock(job["walltime_s"])}\n'
                    f'    ctime = {time.ctime(job["submitted"])}\n'
                    + (f'    stime = {time.ctime(job["start"])}\n' if job['start'] else '')
                )
            return status
        shown = json.dumps(
            {
                'timestamp': int(time.time()),
                'pbs_version': '2022.1.1',
                'pbs_server': SERVER,
                'Jobs': {f'{number}.{SERVER}': job_of(job) for number, job in found.items()},
            },
            indent=4,
        )
    print(shown.replace('": ', '":').replace('"@BROKEN@"', BROKEN))
    return status


# Users' environments as qstat copies them.
BROKEN = (
    '"a "quoted" \\[\\033[01;32m\\] prompt",\n                "BASH_FUNC_module%%":"() { '
    ' eval `/usr/bin/modulecmd bash "$@"`\n}",'
    '\n                "ZEROS":007'
)


def queue_of(queue: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        'queue_type': 'Execution',
        'enabled': queue.get('enabled', 'True'),
        'started': 'True',
        **queue.get('says', {}),
    }
    if 'most' in queue:
        shown['resources_max'] = {'nodect': queue['most']}
    if 'longest_s' in queue:
        shown.setdefault('resources_max', {})['walltime'] = clock(queue['longest_s'])
    if 'least' in queue:
        shown['resources_min'] = {'nodect': queue['least']}
    return shown


def job_of(job: Job) -> dict[str, Any]:
    shown: dict[str, Any] = {
        'Job_Name': job['name'],
        'Job_Owner': f'{job["user"]}@login1.{SERVER}',
        'queue': job['queue'],
        'server': SERVER,
        'job_state': {WAITING: 'Q', RUNNING: 'R', ENDING: 'E', OVER: 'F'}[job['state']],
        'Priority': job['priority'],
        'Resource_List': {
            'nodect': job['nodes'],
            'walltime': clock(
                job['least_s'] or job['walltime_s']
                if job['state'] == WAITING
                else job['walltime_s']
            ),
        },
        'run_count': job['runs'],
        'Variable_List': {'PBS_O_HOME': '/home/x', 'PS1': '@BROKEN@'},
    }
    if job['names']:
        shown['exec_vnode'] = '+'.join(f'({name}:ncpus=8)' for name in job['names'])
    if job['start'] is not None:
        shown['stime'] = time.ctime(job['start'])
    if job['planned'] is not None and job['state'] == WAITING:
        shown['estimated'] = {
            'exec_vnode': '+'.join(f'({name}:ncpus=8)' for name in job['planned']['names']),
            'start_time': time.ctime(job['planned']['start']),
        }
    if job['state'] == OVER:
        shown['substate'] = 91 if job['how'] in ('deleted', 'preempted') else 92
        if job['start'] is not None:
            shown['Exit_status'] = -29 if job['how'] == 'timeout' else job['exit']
        if job['how'] == 'preempted':
            shown['comment'] = 'Job preempted by deleting'
    return shown


def show(document: dict[str, Any]) -> int:
    print(
        json.dumps(
            {
                'timestamp': int(time.time()),
                'pbs_version': '2022.1.1',
                'pbs_server': SERVER,
                **document,
            },
            indent=4,
        )
    )
    return 0


def qdel(machine: Machine, arguments: list[str]) -> int:
    status = 0
    with machine.state() as state:
        for word in arguments:
            number = word.split('.')[0]
            if number not in state['jobs']:
                status = complain(f'qdel: Unknown Job Id {word}', 153)
            elif state['jobs'][number]['state'] == OVER:
                status = complain(f'qdel: Job has finished {word}', 35)
            else:
                machine.end(state, number, 'deleted')
    return status


def pbsnodes(machine: Machine, arguments: list[str]) -> int:
    assert arguments == ['-a', '-F', 'json']
    with machine.state() as state:
        return show(
            {'nodes': {name: node_of(state, name, node) for name, node in state['nodes'].items()}}
        )


def node_of(state: State, name: str, node: dict[str, Any]) -> dict[str, Any]:
    jobs = [f'{number}.{SERVER}' for busy, (number, _) in on_nodes(state).items() if busy == name]
    shown: dict[str, Any] = {
        'Mom': name,
        'ntype': 'PBS',
        'state': 'down' if not node.get('up', True) else 'job-exclusive' if jobs else 'free',
        'pcpus': 8,
        'resources_available': {
            'arch': 'linux',
            'host': name,
            'ncpus': 8,
            'vnode': name,
            **node.get('has', {}),
        },
        'resources_assigned': {'ncpus': 8} if jobs else {},
        'sharing': 'force_exclhost',
    }
    return {**shown, 'jobs': jobs} if jobs else shown


def pbs_rstat(machine: Machine, arguments: list[str]) -> int:
    assert arguments == ['-f']
    with machine.state() as state:
        for reservation in state['reservations']:
            vnodes = '+'.join(f'({name}:ncpus=8)' for name in reservation['nodes'])
            print(
                f'Resv ID: {reservation["name"]}.{SERVER}\nReserve_Name = '
                'maintenance\nreserve_state = RESV_CONFIRMED\n'
                f'reserve_start = {time.ctime(reservation["start"])}\nreserve_end = '
                f'{time.ctime(reservation["end"])}\n'
                'reserve_duration = '
                f'{int(reservation["end"] - reservation["start"])}\nresv_nodes = '
                f'{vnodes}\n'
            )
    return 0


def mpiexec(machine: Machine, arguments: list[str]) -> int:
    return launch(os.environ['PBS_NODEFILE'], arguments)


COMMANDS: dict[str, Command] = {
    'mpiexec': mpiexec,
    'qsub': qsub,
    'qstat': qstat,
    'qdel': qdel,
    'pbsnodes': pbsnodes,
    'pbs_rstat': pbs_rstat,
}

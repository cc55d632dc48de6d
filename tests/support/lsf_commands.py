"""bsub, bjobs, bkill, bhosts, bqueues and blaunch of a test machine, after LSF's documentation."""

import argparse
import json
import os
import time

from tests.support import batch_machine
from tests.support.batch_launch import launch

LOGIN = 'login1'
_REASONS = {
    'timeout': 'TERM_RUNLIMIT: job killed after reaching LSF run time limit',
    'preempted': 'TERM_PREEMPT: job killed after preemption',
    'deleted': 'TERM_OWNER: job killed by owner',
}


def bsub(machine: batch_machine.Machine, arguments: list[str]) -> int:
    if arguments == ['-V']:
        return batch_machine.complain('IBM Spectrum LSF 10.1.0.14', 0)
    parser = argparse.ArgumentParser()
    for option in ('-J', '-o', '-e', '-q', '-n', '-R', '-W', '-P'):
        parser.add_argument(option)
    parser.add_argument('-x', action='store_true')
    parser.add_argument('shell')
    parser.add_argument('script')
    given = parser.parse_args(arguments)
    with machine.state() as state:
        if given.q not in state['queues']:
            return batch_machine.complain(f'{given.q}: No such queue. Job not submitted.', 255)
        number = machine.submit(
            state,
            name=given.J,
            user=batch_machine.user(),
            queue=given.q,
            priority=batch_machine.BLOCK_PRIORITY,
            nodes=int(given.n),
            walltime_s=60.0 * int(given.W),
            script=given.script,
            out=given.o,
            err=given.e,
        )
    print(f'Job <{number}> is submitted to queue <{given.q}>.')
    return 0


def answer(records: list[dict[str, str]]) -> int:
    print(json.dumps({'RECORDS': records}))
    return 0


def bjobs(machine: batch_machine.Machine, arguments: list[str]) -> int:
    assert '-json' in arguments
    now = time.time()
    with machine.state() as state:
        return answer([fields(number, job, now) for number, job in state['jobs'].items()])


def fields(number: str, job: batch_machine.Job, now: float) -> dict[str, str]:
    words = {batch_machine.WAITING: 'PEND'}
    words |= dict.fromkeys((batch_machine.RUNNING, batch_machine.ENDING), 'RUN')
    done = job['state'] == batch_machine.OVER and job['exit'] == 0 and not job['how']
    return {
        'JOBID': number,
        'STAT': words.get(job['state'], 'DONE' if done else 'EXIT'),
        'QUEUE': job['queue'],
        'NREQ_SLOT': str(job['nodes']),
        'RUN_TIME': f'{int(now - job["start"]) if job["start"] else 0} second(s)',
        'RUNTIMELIMIT': f'{job["walltime_s"] / 60:.1f}/login1',
        'EXEC_HOST': ':'.join(job['names']) or '-',
        'USER': job['user'],
        'JOB_NAME': job['name'],
        'EXIT_REASON': _REASONS.get(job['how'], '-'),
    }


def bkill(machine: batch_machine.Machine, arguments: list[str]) -> int:
    with machine.state() as state:
        for number in arguments:
            if state['jobs'][number]['state'] == batch_machine.OVER:
                return batch_machine.complain(f'Job <{number}>: Job has already finished', 255)
            machine.end(state, number, 'deleted')
            print(f'Job <{number}> is being terminated')
    return 0


def bhosts(machine: batch_machine.Machine, arguments: list[str]) -> int:
    assert '-json' in arguments
    with machine.state() as state:
        busy = batch_machine.on_nodes(state)
        rows = []
        for name, node in state['nodes'].items():
            status = 'ok' if node.get('up', True) else 'unavail'
            rows.append({'HOST_NAME': name, 'STATUS': status, 'NJOBS': str(int(name in busy))})
        return answer(rows)


def bqueues(machine: batch_machine.Machine, arguments: list[str]) -> int:
    assert '-json' in arguments
    with machine.state() as state:
        return answer([{'QUEUE_NAME': name, 'STATUS': 'Open:Active'} for name in state['queues']])


def blaunch(machine: batch_machine.Machine, arguments: list[str]) -> int:
    hosts = arguments[1].split()
    return launch(os.environ['MACHINE_NODEFILE'], ['-n', str(len(hosts)), *arguments[2:]])


COMMANDS: dict[str, batch_machine.Command] = {'blaunch': blaunch, 'bsub': bsub, 'bjobs': bjobs}
COMMANDS |= {'bkill': bkill, 'bhosts': bhosts, 'bqueues': bqueues}

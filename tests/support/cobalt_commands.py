"""The commands of a test machine, after Cobalt's source and the user guide of Theta."""

import argparse
import os
import sys
import time
from pathlib import Path

from tests.support import batch_machine as bm
from tests.support.batch_launch import launch

LOGIN = 'thetamom1'
DATE = '%a %b %d %H:%M:%S %Y %z (%Z)'


def qsub(machine: bm.Machine, arguments: list[str]) -> int:
    [script] = arguments
    if not os.access(script, os.X_OK):
        return bm.complain(f'command {script} not found, or is not executable', 1)
    parser = argparse.ArgumentParser()
    for option in ('--jobname', '-o', '-e', '--debuglog', '-q', '-n', '-t', '-A', '--attrs'):
        parser.add_argument(option)
    given = parser.parse_args(bm.directives(script, '#COBALT '))
    attrs = dict(part.split('=') for part in given.attrs.split(':')) if given.attrs else {}
    with machine.state() as state:
        queue = state['queues'].get(given.q)
        if queue is None:
            return bm.complain(f"'{given.q}' is not a valid queue", 1)
        if int(given.n) > queue.get('most', 10_000) or 60 * int(given.t) > queue.get(
            'longest_s', 1e9
        ):
            return bm.complain('Walltime or nodecount greater than the limits of the queue', 1)
        # Before the job, whose end is written behind it.
        Path(given.debuglog).write_text(
            f'{time.strftime(DATE)} submitted with cwd set to: {Path.cwd()}\n'
        )
        number = machine.submit(
            state,
            name=given.jobname,
            user=bm.user(),
            queue=given.q,
            priority=bm.BLOCK_PRIORITY,
            nodes=int(given.n),
            walltime_s=60.0 * int(given.t),
            script=script,
            out=given.o,
            err=given.e,
            log=given.debuglog,
            account=given.A,
            wants={name: attrs[name] for name in ('mcdram', 'numa') if name in attrs},
        )
    print('WARNING: no filesystems requested', file=sys.stderr)
    print(f'Job routed to queue "{given.q}".\n{number}')
    return 0


def vertical(records: list[dict[str, object]]) -> None:
    for record in records:
        (first, value), *rest = record.items()
        print(f'{first}: {value}')
        for name, value in rest:
            print(f'    {name:<18}: {value}')
        print()


def table(heads: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [
        '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in [heads, *rows]
    ]
    print('\n'.join([lines[0], '=' * len(lines[0]), *lines[1:]]))


def qstat(machine: bm.Machine, arguments: list[str]) -> int:
    if arguments == ['--version']:
        print('Cobalt 1.0.30')
        return 0
    assert '-l' in arguments
    with machine.state() as state:
        if '-Q' in arguments:
            vertical(
                [
                    {
                        'Name': name,
                        'Users': None,
                        'MinTime': None,
                        'MaxTime': bm.clock(queue['longest_s']) if 'longest_s' in queue else None,
                        'MaxRunning': 20,
                        'MaxQueued': queue.get('waiting'),
                        'MaxUserNodes': queue.get('most'),
                        'TotalNodes': None,
                        'State': 'stopped' if queue.get('enabled') == 'False' else 'running',
                    }
                    for name, queue in state['queues'].items()
                ]
            )
            return 0
        heads = arguments[arguments.index('--header') + 1].split(':')
        shown = [(number, job) for number, job in state['jobs'].items() if job['state'] != bm.OVER]
        vertical([{head: fields(number, job)[head] for head in heads} for number, job in shown])
    return 0


def fields(number: str, job: bm.Job) -> dict[str, object]:
    numbers = [int(name[3:]) for name in job['names']]
    return {
        'JobID': number,
        'User': job['user'],
        'Nodes': job['nodes'],
        'Queue': job['queue'],
        'WallTime': bm.clock(job['walltime_s']),
        'State': {bm.WAITING: 'queued', bm.RUNNING: 'running', bm.ENDING: 'killing'}[job['state']],
        'JobName': job['name'],
        'Location': ranges(numbers) or 'None',
        'TimeRemaining': 'N/A',
        'StartTime': 'N/A'
        if job['start'] is None
        else time.strftime(DATE, time.localtime(job['start'])),
    }


def ranges(numbers: list[int]) -> str:
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ','.join(str(first) if first == last else f'{first}-{last}' for first, last in found)


def qdel(machine: bm.Machine, arguments: list[str]) -> int:
    with machine.state() as state:
        known = [
            number
            for number in arguments
            if number in state['jobs'] and state['jobs'][number]['state'] != bm.OVER
        ]
        for number in known:
            job = state['jobs'][number]
            if job.get('log'):
                with open(job['log'], 'a') as log:
                    log.write(f'{time.strftime(DATE)} user delete requested by {job["user"]}\n')
            machine.end(state, number, 'deleted')
    if not known:
        return bm.complain('No jobs found to delete', 1)
    print('      Deleted Jobs\nJobID  User\n============\n' + '\n'.join(known))
    return 0


def nodelist(machine: bm.Machine, arguments: list[str]) -> int:
    assert not arguments
    now = time.time()
    with machine.state() as state:
        busy = bm.on_nodes(state)
        drained: dict[str, float] = {}
        for job in reversed(state['jobs'].values()):
            if job['planned'] and job['state'] == bm.WAITING:
                drained |= dict.fromkeys(job['planned']['names'], job['planned']['start'])
        rows = []
        for name, node in state['nodes'].items():
            number, has = int(name[3:]), node.get('has', {})
            ends = name in busy and busy[name][1]['state'] == bm.ENDING
            status = 'cleanup-pending' if ends else 'busy' if name in busy else 'idle'
            status = status if node.get('up', True) else 'down'
            place, queues = f'c0-0c0s{number // 4}n{number % 4}', ':'.join(state['queues'])
            soon = bm.clock(drained[name] - now) if name in drained else '-'
            rows.append([str(number), place, queues, status, has['mcdram'], has['numa'], soon])
    table(['Node_id', 'Name', 'Queues', 'Status', 'MCDRAM', 'NUMA', 'Backfill'], rows)
    return 0


def showres(machine: bm.Machine, arguments: list[str]) -> int:
    assert not arguments
    with machine.state() as state:
        rows = [
            [
                r['name'],
                'batch',
                'None',
                time.strftime(DATE, time.localtime(r['start'])),
                bm.clock(r['end'] - r['start'])[:5],
                'Blocked',
                ranges([int(name[3:]) for name in r['nodes']]),
            ]
            for r in state['reservations']
        ]
    if rows:
        table(['Reservation', 'Queue', 'User', 'Start', 'Duration', 'Passthrough', 'Nodes'], rows)
    return 0


def aprun(machine: bm.Machine, arguments: list[str]) -> int:
    return launch(os.environ['COBALT_NODEFILE'], arguments)


COMMANDS: dict[str, bm.Command] = {'aprun': aprun, 'qsub': qsub, 'qstat': qstat, 'qdel': qdel}
COMMANDS |= {'nodelist': nodelist, 'showres': showres}

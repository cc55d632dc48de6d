"""A scene on a Slurm cluster of four nodes, and what Slurm says of it, recorded with the questions
that sites ask: ``python -m tests.support.slurm_scene FOLDER``.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from parsl_freetrain.sites.slurm import answers_json, answers_text

MARK = '0123456789abcdef'
QUESTIONS = {
    'sinfo.txt': answers_text.NODES,
    'squeue.txt': answers_text.JOBS,
    'gpus.txt': answers_text.GPUS,
    'reservation.txt': answers_text.RESERVATIONS,
    'partition.txt': answers_text.PARTITIONS,
    'squeue.json': answers_json.JOBS,  # last: 20.11 has no answer
}
# One exclusive node each (one shares), ten minutes, if nothing else is said; the first three run.
JOBS = (
    '-J running -w node01 -t 30',
    '-J running-gpu -w node02 --gres=gpu:1 -t 20',
    '-J ends-badly -w node03 -t 1 --wrap=false',
    '-J named -w node01',
    '-J icelake -C icelake',
    '-J either -C skylake|icelake -N 2 -x node04',
    '-J both -C icelake&big',
    '-J gpus --gres=gpu:2 -N 2',
    '-J gpus-in-all --gpus=3 -N 2',
    '-J gpus-of-tasks --gpus-per-task=1 -n 2',
    '-J gpus-of-sockets --gpus-per-socket=1 --sockets-per-node=1',
    '-J array -a 0-7%3 -N 3',
    '-J held -H',
    '-J tomorrow -b now+1day',
    '-J behind -d afterok:2',  # in 20.11 the first job is number 2
    '-J large -N 4 -t 60',
    '-J reserved --reservation=ours',
    '-J shared -w node04',
    '-J |odd%name\nJobId=9 -N 1 -w node02',
)
STATES = (
    'update NodeName=node01 AvailableFeatures=skylake,big ActiveFeatures=skylake',
    'update NodeName=node02 AvailableFeatures=icelake,big ActiveFeatures=icelake,big',
    'update NodeName=node03 AvailableFeatures=icelake ActiveFeatures=icelake',
    'update NodeName=node04 State=DRAIN Reason=StartTime=1',
    'create reservation ReservationName=ours StartTime=now+5hours Duration=60 Users=root '
    'Nodes=node03 Comment=Nodes=node01_StartTime=1_EndTime=2',
    'create reservation ReservationName=maint StartTime=now+9hours Duration=60 Users=root '
    'Flags=MAINT Nodes=node[01-02] Comment=EndTime=5',
)


def ask(*command: str) -> str:
    told = {**os.environ, 'SLURM_TIME_FORMAT': '%s', 'SQUEUE_FORMAT': answers_text.job_format(MARK)}
    return subprocess.run(command, env=told, check=True, text=True, capture_output=True).stdout


def begin() -> None:
    """Set the scene, and wait until the scheduler has made its plans."""
    for state in STATES:
        words = state.split(' ')
        try:
            ask('scontrol', *words)
        except subprocess.CalledProcessError:  # 22.05 knows no comments of reservations
            ask('scontrol', *(word for word in words if not word.startswith('Comment=')))
    for job in JOBS:
        words = job.split(' -')
        words = [words[0], *(f'-{word}' for word in words[1:])]
        options = [part for word in words for part in word.split(' ', 1)]
        wrap = () if '--wrap=false' in options else ('--wrap=sleep 9999',)
        ask('sbatch', *('--exclusive',)['shared' in job :], '-o/dev/null', '-t10', *options, *wrap)
        time.sleep(0.2)
    time.sleep(15)


def record(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, question in QUESTIONS.items():
        said = ask(*question)
        if name.endswith('.json'):  # a line for each job
            jobs = ',\n'.join(json.dumps(job) for job in json.loads(said)['jobs'])
            said = f'{{"jobs": [\n{jobs}\n]}}\n'
        (folder / name).write_text(said)


if __name__ == '__main__':
    begin()
    record(Path(sys.argv[1]))

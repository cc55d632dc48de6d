"""Instructions (callgrind's count; needs valgrind) of a step in reproducible mode and of a plain
loop with the same micro-batches: ``python -m tests.benchmarks.instructions NETWORK SHARDS``, JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from parsl_freetrain.training.comm import peers
from parsl_freetrain.training.loop import wishes
from parsl_freetrain.training.steps import nonfinite
from parsl_freetrain.training.steps.determinism import fill_new_memory
from tests.benchmarks.alternating import context
from tests.gpu import in_rank
from tests.gpu.networks import WORKLOADS

WARM_UP, STEPS = 9, 3  # no thorough look at the weights is among the latter
VALGRIND = 'valgrind --tool=callgrind --instr-atstart=no'
PLAIN_KERNELS = {'ATEN_CPU_CAPABILITY': 'default', 'OMP_NUM_THREADS': '1'}  # others it cannot run


def control(*options: str) -> None:
    subprocess.run(['callgrind_control', *options, str(os.getpid())], check=True, text=True)


def counted(network: str, shards: int, folder: str) -> None:
    """Takes steps, and has the instructions dumped: of both, in this order."""
    nonfinite.LOOK_EVERY_S = peers.EVERY_S = wishes.PROGRESS_EVERY_S = 1e9
    fill_new_memory(False)
    cpu, how = torch.device('cpu'), {'mode': 'reproducible', 'shards': shards}
    ctx = context(folder, peers.Peers(), cpu, **how)
    ours = in_rank._ours(ctx, WORKLOADS[network], '').__next__
    plain = in_rank._plain(cpu, WORKLOADS[network], -shards, '').__next__
    for _ in range(WARM_UP):
        ours(), plain()
    control('-i', 'on')
    for steps in (ours, plain):
        control('-z')
        for _ in range(STEPS):
            steps()
        control('-d')
    os._exit(0)


def main(network: str, shards: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = f'--callgrind-out-file={folder}/out'
        own = ['-m', 'tests.benchmarks.instructions', network, str(shards), folder]
        command = [*VALGRIND.split(), out, sys.executable, *own]
        subprocess.run(
            command, env={**os.environ, **PLAIN_KERNELS}, check=True, capture_output=True
        )
        dumps = [(Path(folder) / f'out.{number}').read_text() for number in (1, 2)]
        ours, plain = (int(re.findall(r'^totals: (\d+)', dump, re.M)[0]) / STEPS for dump in dumps)
    print(json.dumps({'ours': ours, 'plain': plain, 'share': plain / ours}))


if __name__ == '__main__':
    name, number, *where = sys.argv[1:]
    if where:  # the function around a loop is all that a rank has, too
        threading.Thread(target=counted, args=(name, int(number), *where)).start()
    else:
        main(name, int(number))

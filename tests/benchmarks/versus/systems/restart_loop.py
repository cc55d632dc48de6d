"""Plain DDP in a loop that starts all ranks again when one of them ends or nodes come and go."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.versus.constants import NODE_VARIABLE, SAVED
from tests.benchmarks.versus.machine import Machine, free_port
from tests.benchmarks.versus.systems.protocol import System


class RestartLoop(System):
    name = 'restart loop, plain DDP'

    def start(self, machine: Machine, nodes: list[str]) -> None:
        super().start(machine, nodes)
        saved = {SAVED: f'{machine.folder}/saved.pt'}
        machine.run(['python', '-m', __name__], environment=saved)


def ranks_on(nodes: list[str]) -> list[subprocess.Popen[bytes]]:
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, '-m', 'tests.benchmarks.versus.plain_ddp'],
            env={
                **os.environ,
                NODE_VARIABLE: node,
                'RANK': str(rank),
                'WORLD_SIZE': str(len(nodes)),
                'MASTER_ADDR': '127.0.0.1',
                'MASTER_PORT': port,
            },
        )
        for rank, node in enumerate(nodes)
    ]


def loop() -> None:
    while True:
        nodes = sorted(path.name for path in Path('nodes').iterdir())
        ranks = ranks_on(nodes)
        while all(rank.poll() is None for rank in ranks):
            time.sleep(0.02)
            if {path.name for path in Path('nodes').iterdir()} - set(nodes):
                ranks[0].terminate()  # it saves first
                try:
                    ranks[0].wait(5)
                except subprocess.TimeoutExpired:
                    pass
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == '__main__':
    loop()

"""torchrun with a range of nodes, one agent for each node."""

from tests.benchmarks.versus.constants import SAVED
from tests.benchmarks.versus.machine import Machine, free_port
from tests.benchmarks.versus.systems.protocol import System


class TorchrunElastic(System):
    name = 'torchrun elastic'

    def __init__(self) -> None:
        self._port = free_port()

    def join(self, machine: Machine, node: str) -> None:
        machine.run(
            [
                'torchrun',
                '--nnodes=1:4',
                '--nproc-per-node=1',
                '--max-restarts=1000',
                '--monitor-interval=0.1',
                '--rdzv-backend=c10d',
                f'--rdzv-endpoint=127.0.0.1:{self._port}',
                '--rdzv-id=versus',
                # The first node, which is never killed, has the store; a lost agent counts as lost
                # after three seconds, and a round closes one second after it could begin.
                f'--rdzv-conf=is_host={int(node == "node0")},last_call_timeout=1,'
                'keep_alive_interval=1,keep_alive_max_attempt=3',
                '-m',
                'tests.benchmarks.versus.plain_ddp',
            ],
            node,
            {
                SAVED: f'{machine.folder}/saved.pt',
                # With a store that rounds share, an agent that joins later waits for an address
                # that the others told in an earlier round (torch 2.13): nobody goes on.
                'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1',
            },
        )

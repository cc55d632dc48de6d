"""mpiexec and aprun of a test machine: a process for each node of the job, on this computer."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

WITH_VALUE = ('-n', '-N', '--ppn', '--cpu-bind', '-cc', '-d', '-j')


def launch(nodefile: str, arguments: Sequence[str]) -> int:
    """Run the command once on each node, pass signals on to it, and end with the worst status."""
    words = list(arguments)
    count = None
    while words and words[0].startswith('-'):
        option = words.pop(0)
        value = words.pop(0) if option in WITH_VALUE else ''
        count = int(value) if option == '-n' else count
    names = Path(nodefile).read_text().split()
    assert count == len(names), f'{count} processes for the nodes {names}'
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward)
    for name in names:
        # Separate sessions, as on separate nodes.
        processes.append(
            subprocess.Popen(
                words,
                env={**os.environ, 'MACHINE_NODE': name},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    while any(process.poll() is None for process in processes):
        time.sleep(0.02)
    return max(128 - code if (code := process.returncode) < 0 else code for process in processes)

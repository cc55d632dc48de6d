"""The daemon of one job: runs the script, passes SIGTERM on as PBS does, says how it ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

KILL_DELAY_S = 5.0


def main(order: Path) -> None:
    given = json.loads(order.read_text())
    end = Path(given['end'])
    with open(given['out'], 'ab') as out, open(given['err'], 'ab') as err:
        process = subprocess.Popen(
            ['/bin/bash', given['script']],
            env={**os.environ, **given['environment']},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    kill_at = None
    while process.poll() is None:
        if kill_at is None and end.exists():
            kill_at = time.monotonic() + KILL_DELAY_S
            signal_session(process.pid)
        if kill_at is not None and time.monotonic() >= kill_at:
            kill_all(given['environment']['MACHINE_JOB'])
        time.sleep(0.02)
    kill_all(given['environment']['MACHINE_JOB'])
    code = process.returncode
    code = 256 - code if code < 0 else code
    if given['log'] is not None:
        with open(given['log'], 'a') as log:
            log.write(
                'Mon Nov 13 08:00:00 2017 +0000 (UTC) task completed normally with an '
                f'exit code of {code}; '
                'initiating job cleanup and removal\n'
            )
    part = Path(given['exit'] + '.part')
    part.write_text(str(code))
    part.rename(given['exit'])


def signal_session(sid: int) -> None:
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == sid:
                os.kill(pid, signal.SIGTERM)


def kill_all(mark: str) -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        found = [process for process in psutil.process_iter() if belongs(process, mark)]
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not found:
            return
        time.sleep(0.01)


def belongs(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(
            process.status() != psutil.STATUS_ZOMBIE
            and process.environ().get('MACHINE_JOB') == mark
        )
    except (psutil.Error, OSError):
        return False


if __name__ == '__main__':
    main(Path(sys.argv[1]))

"""The interchange's process; Parsl's executor starts it and writes its settings to its input."""

import os
import pickle
import signal
import sys
import threading

from parsl_freetrain.executor.parsl_import import import_parsl
from parsl_freetrain.host.processes import allow_open_files


def main() -> None:
    # They may reach all processes; the submitting one ends this one when trainers have saved.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    parent = os.getppid()
    threading.Thread(target=_end_by_parent, args=(parent,), daemon=True).start()
    allow_open_files()
    import_parsl(runs_apps=False)
    from parsl_freetrain.executor.interchange import PinningInterchange

    if os.getppid() == parent:  # or else it was killed meanwhile, and nobody would end this one
        PinningInterchange(**pickle.load(sys.stdin.buffer)).start()  # noqa: S301


def _end_by_parent(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)


if __name__ == '__main__':
    main()

"""The interchange's process; Parsl's executor starts it and writes its settings to its input."""

from __future__ import annotations

import pickle
import signal
import sys

from parsl_freetrain.executor.parsl_import import import_parsl
from parsl_freetrain.host.processes import allow_open_files


def main() -> None:
    # Ctrl-C reaches the whole terminal; the submitting process ends this one in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_open_files()
    import_parsl(runs_apps=False)
    from parsl_freetrain.executor.interchange import PinningInterchange

    PinningInterchange(**pickle.load(sys.stdin.buffer)).start()  # noqa: S301


if __name__ == '__main__':
    main()

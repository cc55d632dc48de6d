"""Programs that tests run."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.waiting import LIMIT_S


def run_to_end(
    words: Sequence[str | Path], *, more_env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its output as text; ``more_env`` is added to this
    process's environment.
    """
    if more_env is not None:
        more['env'] = {**os.environ, **more_env}
    if 'input' not in more:
        more['stdin'] = subprocess.DEVNULL
    more = {'check': False, 'timeout': LIMIT_S, **more}
    return subprocess.run(words, capture_output=True, text=True, **more)

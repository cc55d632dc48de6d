"""The names of trainers."""

from __future__ import annotations

import re
import threading

from parsl_freetrain.core.model.errors import BadInput

NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9._-]*')
OURS = ('environment', 'logs', 'requests', 'run.json')  # beside the folders of trainers


def check_name(name: str) -> None:
    """Refuse a trainer's name that cannot also be a folder's name; raises BadInput."""
    if not NAME.fullmatch(name):
        raise BadInput(
            f'{name!r} cannot name a trainer: it names a folder too, so use letters, digits, dots, '
            'dashes and underscores, and begin with no dot and no dash.'
        )
    if name in OURS or name.startswith('ledger.journal'):
        raise BadInput(
            f'{name!r} cannot name a trainer, since a run keeps something else under this name in '
            'its checkpoint_dir; give another trainer_name.'
        )


class TrainerNames:
    """The names of one run's trainers, each used once. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def take(self, name: str, *, explicit: bool) -> str:
        """``name``, or if it is taken ``name-2`` and so on; BadInput if it is ``explicit``."""
        with self._lock:
            if explicit and name in self._taken:
                raise BadInput(
                    f'There is a trainer {name!r} in this run already; give another trainer_name.'
                )
            free, number = name, 1
            while free in self._taken:
                number += 1
                free = f'{name}-{number}'
            self._taken.add(free)
        return free

    def free(self, name: str) -> None:
        with self._lock:
            self._taken.discard(name)

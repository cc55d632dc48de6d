"""What another user of this computer may try; only root can become one."""

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator

import pytest

OTHER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason='only root can become another user')


@contextlib.contextmanager
def as_other_user(act: Callable[[], object], user: int = OTHER) -> Iterator[int]:
    """Run ``act`` in a forked process of another user, to the exit. Yields its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

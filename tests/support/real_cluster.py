"""What the real schedulers on this computer share: a program that starts and stops them."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from tests.support.programs import run_to_end
from tests.support.waiting import LIMIT_S, looks

START_S = 120.0  # they start in seconds
NODES = 4


class RealCluster:
    """A running scheduler with its nodes, ``node01`` and so on; its files are in ``folder``."""

    program: ClassVar[Path]
    variable: ClassVar[str]
    """Names the folder to the program."""
    hidden: ClassVar[tuple[str, ...]]
    """How variables begin that the program must not see."""
    settings: ClassVar[dict[str, str]] = {}
    """Of the program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """With which its commands reach it."""
        raise NotImplementedError

    @classmethod
    @contextmanager
    def running(cls, nodes: int = NODES, *, within: str, **settings: str) -> Iterator[Self]:
        """A new one, in a folder with a short path, as sockets need."""
        made = Path(tempfile.mkdtemp(prefix='ft-', dir=within))
        cluster = cls(made)
        try:
            # Each looks for free ports first, and other sessions do, too.
            with Path(tempfile.gettempdir(), f'ft-alone-{os.getuid()}.lock').open('w') as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                cluster.control('up', str(nodes), timeout_s=START_S, **settings)
            yield cluster
        finally:
            cluster.control('down')
            shutil.rmtree(made, ignore_errors=True)

    def control(self, *arguments: str, timeout_s: float = LIMIT_S, **settings: str) -> str:
        """Run the cluster's own program; return its output."""
        # Daemons belong to the whole session: they must not carry the mark of a test's processes.
        hidden = ('FREETRAIN_TEST', *self.hidden)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        own = {**self.settings, **settings, self.variable: str(self.folder)}
        with tempfile.TemporaryFile('w+') as said:  # no pipe, which daemons would keep open
            done: Any = subprocess.run(
                [str(self.program), *arguments],
                env={**kept, **own},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=timeout_s,
                check=False,
            )
            said.seek(0)
            text = said.read()
        assert done.returncode == 0, f'{arguments}: {text}'
        return text

    def run(self, *command: str) -> str:
        """Run a command of the scheduler; return its output."""
        done = run_to_end(command, cwd=self.folder, more_env=self.environment)
        assert done.returncode == 0, f'{command}: {done.stdout}{done.stderr}'
        return done.stdout

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        for _ in looks(limit_s):
            if condition():
                return
        raise AssertionError(f'did not come true within {limit_s} s\n{self.all()}')

    def all(self) -> str:
        """All jobs and nodes, for whoever reads why a test failed."""
        raise NotImplementedError


C = TypeVar('C', bound=RealCluster)


class Shared(Generic[C]):
    """What the tests of this process share; ``cluster``: None as long as none needs it."""

    def __init__(self, running: Callable[[], AbstractContextManager[C]]) -> None:
        self._running, self._ending = running, ExitStack()
        self.cluster: C | None = None

    def begin(self) -> C:
        if self.cluster is None:
            self.cluster = self._ending.enter_context(self._running())
        return self.cluster

    def end(self) -> None:
        self.cluster = None
        self._ending.close()

"""The Globus Compute web service, real in messages and serializers; no login, REST or AMQP."""

import contextlib
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import globus_compute_sdk
import psutil
from globus_compute_common import messagepack
from globus_compute_common.messagepack.message_types import Result, Task
from globus_compute_sdk.errors import TaskExecutionFailed
from globus_compute_sdk.serialize import ComputeSerializer

from tests.support.waiting import LIMIT_S

Deliver = Callable[[str, bytes, dict[str, Any], Callable[[bytes], None]], None]


class OfflineExecutor(globus_compute_sdk.Executor):  # type: ignore[misc]
    """An SDK executor whose tasks go to ``deliver``."""

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self._resource_specification: dict[str, Any] | None = None
        self._user_endpoint_config: dict[str, Any] | None = None
        self._stopped = False
        self.serde = ComputeSerializer()
        self.open: dict[str, Future[Any]] = {}

    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        task_id = str(uuid.uuid4())
        buffer = self.serde.pack_buffers(
            [self.serde.serialize(fn), self.serde.serialize(args), self.serde.serialize(kwargs)]
        )
        packed = messagepack.pack(Task(task_id=task_id, task_buffer=buffer))
        specification = json.loads(
            json.dumps(self.resource_specification or {})
        )  # it travels in a header, as JSON
        self.open[task_id] = future
        self.deliver(task_id, packed, specification, lambda body: self._came(task_id, body))
        return future

    def _came(self, task_id: str, body: bytes) -> None:
        result = messagepack.unpack(body)
        assert isinstance(result, Result)
        future = self.open.pop(task_id, None)
        if future is None:
            return  # nobody listens any more
        if result.is_error:
            future.set_exception(TaskExecutionFailed(result.data))
        else:
            future.set_result(self.serde.deserialize(result.data))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._stopped = True


class EndpointProcess:
    """A user endpoint process, anew for each life: ``config`` in YAML, a short ``folder``."""

    def __init__(self, config: str, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.lives = 0
        self._waiting: dict[str, Callable[[bytes], None]] = {}
        self._sending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Connection | None = None

    def start(self) -> None:
        self.lives += 1
        life = self.folder / f'life-{self.lives}'
        life.mkdir(parents=True)
        (life / 'config.yaml').write_text(self.config)
        with (life / 'output.txt').open('wb') as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name('process.py')), str(life)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd='/',
            )
        end = time.monotonic() + LIMIT_S
        while not (life / 'ready').exists():
            assert self._process.poll() is None and time.monotonic() < end, (
                life / 'output.txt'
            ).read_text()
            time.sleep(0.05)
        self._wire = Client(str(life / 'socket'))
        threading.Thread(target=self._listen, args=(self._wire,), daemon=True).start()

    def deliver(
        self,
        task_id: str,
        packed: bytes,
        specification: dict[str, Any],
        came: Callable[[bytes], None],
    ) -> None:
        self._waiting[task_id] = came
        with self._sending:
            if self._wire is None:
                raise ConnectionError('no endpoint')
            self._wire.send((task_id, packed, specification))

    def _listen(self, wire: Connection) -> None:
        try:
            while True:
                task_id, body = wire.recv()
                self._waiting.pop(task_id)(body)
        except (EOFError, OSError):
            return

    def kill(self) -> None:
        """kill -9, also its workers; what was sent to it is lost without a word."""
        assert self._process is not None
        found = set()
        for one in psutil.process_iter():  # workers are not its children for long
            with contextlib.suppress(psutil.Error):
                if one.pid == self._process.pid or str(self.folder) in ' '.join(one.cmdline()):
                    found |= {one, *one.children(recursive=True)}
        for one in found:
            with contextlib.suppress(psutil.Error):
                if 'parsl_freetrain.remote' not in ' '.join(one.cmdline()):
                    one.kill()
        self._process.kill()
        self._process.wait()
        self._wire = None
        self._waiting.clear()

"""A user endpoint process as Globus Compute makes it, behind a socket in place of its broker."""

import sys
import threading
import uuid
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from globus_compute_endpoint.endpoint.config.utils import load_config_yaml
from globus_compute_endpoint.engines import GCFuture


def main(life: Path) -> None:
    engine: Any = load_config_yaml((life / 'config.yaml').read_text()).engine
    engine.start(endpoint_id=uuid.uuid4(), run_dir=str(life))
    listener = Listener(str(life / 'socket'))
    (life / 'ready').touch()
    serve(engine, listener)


def serve(engine: Any, listener: Listener) -> None:
    wire = listener.accept()
    sending = threading.Lock()

    def answered(task_id: str, future: GCFuture) -> None:
        with sending:
            wire.send((task_id, future.result()))

    while True:
        try:
            task_id, packed, specification = wire.recv()
        except EOFError:
            return
        future = GCFuture(task_id)
        future.add_done_callback(lambda done, task_id=task_id: answered(task_id, done))
        engine.submit(task_f=future, packed_task=packed, resource_specification=specification)


if __name__ == '__main__':
    main(Path(sys.argv[1]))

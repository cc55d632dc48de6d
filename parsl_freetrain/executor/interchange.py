"""Parsl's interchange with tasks pinned to managers: the only place that leans on Parsl's private API.

A task whose resource specification has ``freetrain_manager`` goes to that manager or fails with
``ManagerLost``; every manager keeps one worker free for such tasks.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.high_throughput.errors import ManagerLost
from parsl.executors.high_throughput.interchange import Interchange
from parsl.serialize import serialize

PIN = 'freetrain_manager'


class PinningInterchange(Interchange):
    """Serves pinned tasks first, then leaves the rest to Parsl."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._owner = os.getppid()
        self._pinned: dict[bytes, set[int]] = {}

    def process_tasks_to_send(self, interesting_managers: set[bytes], monitoring_radio: Any) -> None:
        if os.getppid() != self._owner:
            os._exit(1)  # nobody is left to work for; a normal exit would wait for the authentication thread
        pinned = [e for e in self.pending_task_queue if PIN in e[-1]['context'].get('resource_spec', {})]
        for entry in pinned:
            self.pending_task_queue.remove(entry)   # or Parsl would give those that wait to any manager that is free
        waiting = [entry for entry in pinned if not self._send_pinned(entry[-1])]
        reserving = [m for i, m in self._ready_managers.items() if not self._pinned.get(i, set()) & set(m['tasks'])]
        for manager in reserving:
            manager['max_capacity'] -= 1
        super().process_tasks_to_send(interesting_managers, monitoring_radio)
        for manager in reserving:
            manager['max_capacity'] += 1
        self.pending_task_queue.update(waiting)

    def _send_pinned(self, task: Any) -> bool:
        """Whether the task has gone, to its manager or as one that failed."""
        manager_id = task['context']['resource_spec'][PIN].encode()
        manager = self._ready_managers.get(manager_id)
        if manager is None:
            error = ManagerLost(manager_id, 'its node')
            failure = serialize(RemoteExceptionWrapper(type(error), error, None))
            self.results_outgoing.send(pickle.dumps({'type': 'result', 'task_id': task['task_id'], 'exception': failure}))
        elif len(manager['tasks']) < manager['max_capacity']:
            self.manager_sock.send_multipart([manager_id, pickle.dumps([task])])
            manager['tasks'].append(task['task_id'])
            manager['idle_since'] = None
            self._pinned[manager_id] = self._pinned.get(manager_id, set()) & set(manager['tasks']) | {task['task_id']}
        else:
            return False
        return True


if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the submitting process ends us in order
    PinningInterchange(**pickle.load(sys.stdin.buffer)).start()  # noqa: S301 - as Parsl's own, from the executor's pipe

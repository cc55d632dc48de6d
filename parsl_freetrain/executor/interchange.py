"""Parsl's interchange with tasks pinned to managers, by Parsl's private API, as only
``executor.py`` and ``block/manager.py`` besides. A task with ``freetrain_manager`` is sent to
that manager or fails with ``ManagerLost``; each keeps one worker free. One put on hold is shut
down.
"""

import os
import pickle
from typing import Any

import zmq
from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.high_throughput.errors import ManagerLost
from parsl.executors.high_throughput.interchange import Interchange
from parsl.serialize import serialize

PIN = 'freetrain_manager'


class PinningInterchange(Interchange):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # A manager asks by one connection whether this address is right, and then opens another
        # one with the same name. If that comes before the end of the first is noticed, ZeroMQ would
        # drop it, and the manager would wait for an answer for ever.
        self.manager_sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._owner = os.getppid()
        self._pinned: dict[bytes, set[int]] = {}

    def process_tasks_to_send(
        self, interesting_managers: set[bytes], monitoring_radio: Any
    ) -> None:
        if os.getppid() != self._owner:
            # There is no client left. A normal exit would wait for the authentication thread.
            os._exit(1)
        queue = self.pending_task_queue
        pinned = [e for e in queue if PIN in e[-1]['context'].get('resource_spec', {})]
        for entry in pinned:
            # Otherwise Parsl would give waiting pinned tasks to any free manager.
            self.pending_task_queue.remove(entry)
        waiting = [entry for entry in pinned if not self._send_pinned(entry[-1])]
        self._end_held()
        ready = self._ready_managers.items()
        reserving = [m for i, m in ready if not self._pinned.get(i, set()) & set(m['tasks'])]
        for manager in reserving:
            manager['max_capacity'] -= 1
        super().process_tasks_to_send(interesting_managers, monitoring_radio)
        for manager in reserving:
            manager['max_capacity'] += 1
        self.pending_task_queue.update(waiting)

    def _send_pinned(self, task: Any) -> bool:
        """Send a task to its manager or fail it; False if it has to wait."""
        manager_id = task['context']['resource_spec'][PIN].encode()
        manager = self._ready_managers.get(manager_id)
        if manager is None:
            self._fail(task['task_id'], manager_id)
        elif len(manager['tasks']) < manager['max_capacity']:
            self.manager_sock.send_multipart([manager_id, pickle.dumps([task])])
            manager['tasks'].append(task['task_id'])
            manager['idle_since'] = None
            known = self._pinned.get(manager_id, set()) & set(manager['tasks'])
            self._pinned[manager_id] = known | {task['task_id']}
        else:
            return False
        return True

    def _end_held(self) -> None:
        """Have Parsl shut down the managers that were held, whose blocks are over."""
        for manager_id, manager in self._ready_managers.items():
            if not manager['active']:
                while manager['tasks']:
                    self._fail(manager['tasks'].pop(), manager_id)
                manager['draining'] = True

    def _fail(self, task_id: int, manager_id: bytes) -> None:
        error = ManagerLost(manager_id, 'its node')
        failure = serialize(RemoteExceptionWrapper(type(error), error, None))
        result = {'type': 'result', 'task_id': task_id, 'exception': failure}
        self.results_outgoing.send(pickle.dumps(result))

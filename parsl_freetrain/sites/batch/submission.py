"""How a block is submitted: its shape, its name, its batch script, and not too often."""

import math
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from parsl_freetrain.core.model.errors import BadInput, nodes_text
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.host import files
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output, job_name, shape_for
from parsl_freetrain.sites.batch.block_table import BatchBlock
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.queue_watch import NEVER
from parsl_freetrain.sites.batch.records import Nodes, Partition
from parsl_freetrain.sites.batch.scheduler import Scheduler
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerRefused, SchedulerSilent
from parsl_freetrain.sites.protocols import HoleGone


def within(queue: Partition, options: BatchOptions, step_s: int) -> Partition:
    """The queue within the site config's limits; BadInput if no block fits them all."""
    least = max(queue.least_nodes, options.least_nodes)
    most = min((n for n in (queue.most_nodes, options.most_nodes) if n is not None), default=None)
    if most is not None and least > most:
        raise BadInput(
            f'The queue {queue.name!r} takes {queue.least_nodes} to '
            f'{queue.most_nodes or "any number of"} nodes, and the site config asks for '
            f'{options.least_nodes} to {options.most_nodes or "any number of"}; name another queue.'
        )
    shortest_s = max(float(step_s), queue.shortest_s, options.shortest_s)
    if shortest_s > (queue.longest_s or shortest_s) or shortest_s > options.unplanned_s:
        limit = '' if queue.longest_s is None else f' and its time limit {queue.longest_s:g} s'
        raise BadInput(
            f'The shortest block in the queue {queue.name!r} is {shortest_s:g} s{limit}, '
            'and longest_s in the site config is '
            f'{options.unplanned_s:g}; name another queue, or change shortest_s or longest_s.'
        )
    return replace(queue, least_nodes=least, most_nodes=most, shortest_s=shortest_s)


def check_classes(classes: Sequence[str], nodes: Sequence[Nodes], queue: Partition) -> None:
    """Raises BadInput, with the class and the queue, for a node class that no node has."""
    there = {group.node_class for group in nodes if group.partition == queue.name}
    for name in classes:
        if name not in there:
            raise BadInput(
                f'The site config has the node class {name!r}, and no node of the queue '
                f'{queue.name!r} is of it; correct its entry in node_classes, or leave it out.'
            )


def check_request(request: BlockRequest, queue: Partition) -> None:
    """Refuse (BadInput) what the queue can never give."""
    request.check()
    if request.nodes < queue.least_nodes or request.nodes > (queue.most_nodes or request.nodes):
        raise BadInput(
            f'A block of {nodes_text(request.nodes)} was asked for; the queue {queue.name!r} '
            f'allows {queue.least_nodes} to {queue.most_nodes or "any number of"} nodes.'
        )
    if request.walltime_s is not None and request.walltime_s < queue.shortest_s:
        raise BadInput(
            f'A block of {request.walltime_s:g} s was asked for; the shortest in the queue '
            f'{queue.name!r} needs {queue.shortest_s:g} s or more.'
        )


class Submitter:
    """Submits blocks, at intervals; ``unanswered``: names that may have been accepted."""

    def __init__(
        self, scheduler: Scheduler, options: BatchOptions, clock: Callable[[], float], run: str
    ) -> None:
        self._scheduler, self._options, self._clock = scheduler, options, clock
        self.run = run
        self.start_s = options.start_s
        self._next_s = NEVER
        self.unanswered: set[str] = set()

    def wait_s(self) -> float:
        """Seconds until the next submission is allowed; 0: it is now."""
        left_s = self._next_s - self._clock()
        # More is left than there ever was if the clock was set back.
        return left_s if 0 < left_s <= self._options.submit_every_s else 0.0

    def check(self, partition: Partition) -> None:
        shortest_s = math.ceil(partition.shortest_s)
        shape = BlockShape(partition.least_nodes, shortest_s, shortest_s)
        with tempfile.TemporaryDirectory(prefix='freetrain-') as folder:
            place = self._place(Path(folder), 'test')
            text = self._scheduler.render(shape, place, 'true', '')
            try:
                self._scheduler.test(self._write(place, text))
            except SchedulerRefused as error:
                refuses = f'{self._scheduler.label} would refuse every block in {partition.name!r}'
                raise BadInput(f'{refuses}: {error}; change the site config.') from None

    def preview(
        self,
        request: BlockRequest,
        partition: Partition,
        folder: Path,
        block: str,
        command: str,
        worker_init: str,
    ) -> tuple[BlockShape, Output, str]:
        """What would be asked now, under which name, and the batch script; or BadInput."""
        check_request(request, partition)
        shape = shape_for(
            request.nodes,
            request.walltime_s,
            request.names,
            structs.replace(self._options, start_s=self.start_s),
            min(request.lasts_s, math.inf if partition.longest_s is None else partition.longest_s),
            self._clock(),
            self._scheduler.step_s,
            partition.shortest_s,
        )
        shape = replace(shape, avoid=request.avoid, node_class=request.node_class)
        place = self._place(folder, block, request.node_class)
        return shape, place, self._scheduler.render(shape, place, command, worker_init)

    def submit(self, shape: BlockShape, place: Output, text: str) -> BatchBlock:
        """Submit what :meth:`preview` has answered. As :meth:`.protocols.Site.open_block`."""
        now = self._clock()
        if wait_s := self.wait_s():
            said = f'one submission at a time, the next in {wait_s:.1f} s; look at the holes again.'
            raise HoleGone(f'{self._scheduler.label}: {said}')
        script = self._write(place, text)
        for path in (place.stdout, place.stderr):
            files.replace(Path(path), b'', durable=False)
        self._next_s = now + self._options.submit_every_s
        try:
            job_id = self._scheduler.submit(script)
        except SchedulerSilent:
            self.unanswered.add(place.name)
            raise
        start_by_s = now + self._options.withdraw_s
        latest_s = start_by_s + shape.walltime_s
        if shape.deadline is not None:
            start_by_s = min(start_by_s, float(shape.deadline - shape.least_s))
            latest_s = float(shape.deadline)
        block = job_id, shape.nodes, now, start_by_s, latest_s, place
        needs_s = self._scheduler.needs_s(shape)
        return BatchBlock(*block, node_class=shape.node_class, needs_s=needs_s)

    def _place(self, folder: Path, block: str, node_class: str = '') -> Output:
        name = job_name(self.run, f'{block}.{secrets.token_hex(3)}', node_class)
        return Output(name, str(folder / f'{name}.out'), str(folder / f'{name}.err'))

    def _write(self, place: Output, text: str) -> Path:
        script = Path(place.stdout).with_name(f'{place.name}.sh')
        files.replace(script, text.encode(), mode=self._scheduler.script_mode, durable=False)
        return script

"""A tiny EASY scheduler, second by second, for job logs with known promises; independent."""

from dataclasses import dataclass


@dataclass
class Simulated:
    """A job with its request; the start is found by the simulation."""

    number: int
    submit: int
    nodes: int
    requested: int
    run: int
    start: int = -1

    @property
    def end(self) -> int:
        return self.start + self.run


@dataclass(frozen=True)
class Promise:
    """What the scheduler had reserved at ``at``: the head, its time, how many nodes it leaves."""

    at: int
    head: int
    shadow: int
    extra: int


def shadow_of(head: Simulated, running: list[Simulated], machine: int, now: int) -> tuple[int, int]:
    at = now
    while True:
        free = machine - sum(job.nodes for job in running if job.start + job.requested > at)
        if free >= head.nodes:
            return at, free - head.nodes
        at += 1


def simulate(jobs: list[Simulated], machine: int) -> list[Promise]:
    """Start every job; returns the reservation after every second in which a job waited."""
    promised = []
    queue: list[Simulated] = []
    running: list[Simulated] = []
    coming = sorted(jobs, key=lambda job: (job.submit, job.number))
    now = 0
    while coming or queue:
        running = [job for job in running if job.end > now]
        while coming and coming[0].submit == now:
            queue.append(coming.pop(0))
        idle = machine - sum(job.nodes for job in running)

        def begin(job: Simulated, at: int, of: list[Simulated] = running) -> None:
            job.start = at
            queue.remove(job)
            of.append(job)

        while queue and queue[0].nodes <= idle:
            idle -= queue[0].nodes
            begin(queue[0], now)
        if queue:
            shadow, extra = shadow_of(queue[0], running, machine, now)
            for job in queue[1:]:
                over = now + job.requested <= shadow
                if job.nodes <= idle and (over or job.nodes <= extra):
                    idle -= job.nodes
                    extra -= 0 if over else job.nodes
                    begin(job, now)
            then = shadow_of(queue[0], running, machine, now)
            promised.append(Promise(now, queue[0].number, *then))
        now += 1
    return promised

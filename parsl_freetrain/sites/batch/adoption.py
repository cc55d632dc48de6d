"""Jobs of an earlier run as blocks of this one: pure."""

from __future__ import annotations

from dataclasses import replace

from parsl_freetrain.sites.batch.book import Block
from parsl_freetrain.sites.batch.life import Seen
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import Job
from parsl_freetrain.sites.batch.shape import Place
from parsl_freetrain.sites.protocols import FoundBlock


def block_from(job: Job, options: BatchOptions, now: float) -> Block:
    """A job that was found, as if it had been submitted now; of one that waits, the scheduler alone knows the deadline."""
    start_by_s = now + options.withdraw_s
    running = job.state == 'RUNNING'
    latest_s = job.end_s if running and job.end_s is not None else start_by_s + options.longest_s
    block = Block(job.job_id, job.nodes, now, start_by_s, latest_s, Place(job.name, '', ''))
    return replace(block, seen=Seen(job.state, job.end_s if running else None, running))


def found_from(job: Job) -> FoundBlock:
    """The same for who asked."""
    return FoundBlock(job.job_id, job.nodes, job.partition, job.end_s if job.state == 'RUNNING' else None)

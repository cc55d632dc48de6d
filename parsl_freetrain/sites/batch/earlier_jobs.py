"""Jobs of an earlier run as blocks of this one."""

from __future__ import annotations

from dataclasses import replace

from parsl_freetrain.sites.batch.block_shape import Place, class_in
from parsl_freetrain.sites.batch.block_table import BatchBlock
from parsl_freetrain.sites.batch.life import Seen
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import BatchJob, JobState
from parsl_freetrain.sites.protocols import FoundBlock


def block_from(job: BatchJob, options: BatchOptions, now: float) -> BatchBlock:
    """A job that was found, as if it had been submitted now.

    If it waits, only the scheduler knows its deadline.
    """
    start_by_s = now + options.withdraw_s
    running = job.state is JobState.RUNNING
    latest_s = job.end_s if running and job.end_s is not None else start_by_s + options.unplanned_s
    block = BatchBlock(job.job_id, job.nodes, now, start_by_s, latest_s, Place(job.name, '', ''))
    return replace(
        block,
        seen=Seen(job.state, job.end_s if running else None, running),
        node_class=class_in(job.name, options.classes),
    )


def found_from(job: BatchJob, options: BatchOptions) -> FoundBlock:
    """The same job as a :class:`FoundBlock`."""
    end_s = job.end_s if job.state is JobState.RUNNING else None
    node_class = class_in(job.name, options.classes)
    return FoundBlock(job.job_id, job.nodes, job.partition, end_s, node_class)

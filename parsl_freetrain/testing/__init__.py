"""Faults on demand, for tests of training."""

from __future__ import annotations

from parsl_freetrain.testing.disk import corrupt_checkpoint, full_disk, half_write_checkpoint
from parsl_freetrain.testing.faults import (
    disconnect_at,
    disk_full_at,
    fail_at,
    kill_at,
    kill_between,
    preempt_at,
    slow_rank,
    stop_at,
    with_faults,
)
from parsl_freetrain.testing.scheduler import scheduler_silent_for

__all__ = [
    'corrupt_checkpoint',
    'disconnect_at',
    'disk_full_at',
    'fail_at',
    'full_disk',
    'half_write_checkpoint',
    'kill_at',
    'kill_between',
    'preempt_at',
    'scheduler_silent_for',
    'slow_rank',
    'stop_at',
    'with_faults',
]

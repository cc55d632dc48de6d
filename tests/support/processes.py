"""What tests see of processes."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> str:
    """Its words; empty for one that has ended, such as a child of an earlier test that nobody has asked about since."""
    try:
        return ' '.join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ''

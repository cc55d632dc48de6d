"""Slots of the local site that are slow on purpose, to try out unequal nodes on one computer."""

from __future__ import annotations

import os
import time

SPEED_VARIABLE = 'FREETRAIN_SLOT_SPEED'
"""How fast a slot is, relative to this computer; absent: as fast."""


def wait_as_slow(busy_s: float) -> None:
    """Wait for as long as a slow slot would still need for what took ``busy_s`` seconds here."""
    speed = float(os.environ.get(SPEED_VARIABLE, '1'))
    if speed < 1:
        time.sleep(busy_s / speed - busy_s)

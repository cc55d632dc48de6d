"""What the slots of the local site are told, in place of what real nodes have by themselves."""

import os
import time

SPEED_VARIABLE = 'FREETRAIN_SLOT_SPEED'
"""How fast a slot is, relative to this computer, to try out unequal nodes; absent: as fast."""

DEVICES_VARIABLE = 'FREETRAIN_SLOT_DEVICES'
"""How the slots use this computer's devices, the number of this slot, from 0, and of all slots."""

SHARE, OWN, NONE = 'share', 'own', 'none'


def wait_as_slow(busy_s: float) -> None:
    """Wait for as long as a slow slot would still need for what took ``busy_s`` seconds here."""
    speed = float(os.environ.get(SPEED_VARIABLE, '1'))
    if speed < 1:
        time.sleep(busy_s / speed - busy_s)


def devices_here() -> tuple[str, int, int] | None:
    """What :data:`DEVICES_VARIABLE` says; None: this is no slot of the local site."""
    said = os.environ.get(DEVICES_VARIABLE, '').split()
    return (said[0], int(said[1]), int(said[2])) if len(said) == 3 else None

"""The shortest hole that is worth a fragment."""

from __future__ import annotations

FLOOR_S = 0.5
"""Minimum seconds that a fragment keeps free before its deadline."""


def shortest_useful_s(
    start_s: float | None, step_s: float | None, checkpoint_s: float | None, assumed_s: float
) -> float:
    """The shortest time on nodes in which a fragment can start, train a global batch and save it.

    The fragment itself keeps two checkpoints and a floor free before its deadline, since the last
    checkpoint may take longer than the longest so far (see
    :mod:`parsl_freetrain.training.loop.checkpointer`); the same margin is used here.

    Parameters
    ----------
    start_s
        Longest measured time of this trainer from the decision to the first step, in seconds; None:
        never measured.
    step_s
        Time of one global batch on the nodes in question, in seconds; None: never measured.
    checkpoint_s
        Longest measured time of a checkpoint, in seconds; None: never measured.
    assumed_s
        Minimum seconds of a hole until all of these have been measured.

    Returns
    -------
    float
        Seconds; at least ``assumed_s`` if a time is unknown, possibly less if all are known.

    Raises
    ------
    ValueError
        If a time is negative or not finite.
    """
    known = [seconds for seconds in (start_s, step_s, checkpoint_s) if seconds is not None]
    if any(not 0 <= seconds < float('inf') for seconds in (*known, assumed_s)):
        raise ValueError(
            f'{start_s}, {step_s}, {checkpoint_s} and {assumed_s} must be seconds, 0 or more.'
        )
    needed_s = (start_s or 0.0) + (step_s or 0.0) + 2 * (checkpoint_s or 0.0) + FLOOR_S
    return needed_s if len(known) == 3 else max(needed_s, assumed_s)

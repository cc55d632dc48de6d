"""The rescale costs that decisions assumed, in seconds, learned from a trainer's fragments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parsl_freetrain.core.controller.overheads import Measured
from parsl_freetrain.core.model.types import Trainer

MEASURED = ('Rescaled', 'FragmentTimed')
"""The ledger's events that change the assumed costs."""


class Costs:
    """Learns what a trainer's rescales cost as the controller does, event by event.

    Parameters
    ----------
    spec
        The trainer's specification in the ledger. Costs count as stated if it does not say which
        ones are, as in older ledgers.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        up_s, down_s = (float(spec.get(f'rescale_{way}_s') or 0.0) for way in ('up', 'down'))
        self._trainer = Trainer(
            'it',
            1,
            1,
            rescale_up_s=up_s,
            rescale_down_s=down_s,
            stated_costs=tuple(spec.get('stated_costs', ('up', 'down'))),
        )
        self._measured = Measured()

    def observe(self, event: Mapping[str, Any]) -> None:
        """Add an event of one of the kinds :data:`MEASURED`."""
        detail = event['detail']
        if event['kind'] == 'Rescaled':
            self._measured.rescaled(
                up=detail['after'] > detail['before'], seconds=detail['seconds']
            )
        else:
            self._measured.timed(detail['start_s'], detail['step_s'], detail['checkpoint_s'])

    def of(self, before: int, after: int) -> float:
        """The assumed cost of this change, in seconds at the rate before it."""
        up_s, down_s = self._measured.costs(self._trainer)
        return 0.0 if before == after else up_s if after > before else down_s

"""The settings of a live run's controller: the executor's, its site's, and what runs before it have
used.
"""

from __future__ import annotations

import math
from pathlib import Path

from parsl_freetrain.core.allocation.constraints import EVERYBODY
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.settings import Policy
from parsl_freetrain.journal.usage import charged, used_node_s
from parsl_freetrain.sites.provider import BackfillProvider


def controller_settings(
    policy: Policy, provider: BackfillProvider, ledger: Path, workers_per_node: int
) -> ControllerSettings:
    """Put them together. The ledger, which need not exist, says what was used before. Raises
    BadInput if that is the budget of all trainers, so that nothing can run.
    """
    budgets, total = policy.budgets, policy.budgets.get(EVERYBODY, math.inf)
    used_before = used_node_s(ledger) if budgets else {}
    if used_before.get(EVERYBODY, 0.0) >= total:
        raise BadInput(
            f'The budget of all trainers is {total:.6g} node-seconds, and earlier runs of {ledger} '
            f'have used {used_before.get(EVERYBODY, 0.0):.6g}; raise it to go on from the last '
            'checkpoints.'
        )
    return ControllerSettings(
        **policy.decisions(),
        used_before={key: used_before[key] for key in budgets if key in used_before},
        charged_before=charged(ledger) if policy.charge_budget is not None else 0.0,
        min_hole_s=provider.min_hole_s,
        max_blocks=provider.max_blocks,
        spans_blocks=provider.site.spans_blocks,
        workers_per_node=max(1, workers_per_node),
    )

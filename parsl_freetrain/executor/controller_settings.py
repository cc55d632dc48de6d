"""The settings of a live run's controller: the executor's, its site's, and what runs before it have
used.
"""

from __future__ import annotations

from pathlib import Path

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.executor.settings import Policy
from parsl_freetrain.ledger.usage import charged, used_node_s
from parsl_freetrain.sites.provider import BackfillProvider


def controller_settings(
    policy: Policy, provider: BackfillProvider, ledger: Path, workers_per_node: int
) -> ControllerSettings:
    """Put them together. The ledger, which need not exist, says what was used before."""
    budgets = policy.budgets
    used_before = used_node_s(ledger) if budgets else {}
    return ControllerSettings(
        **policy.decisions(),
        used_before={key: used_before[key] for key in budgets if key in used_before},
        charged_before=charged(ledger) if policy.charge_budget is not None else 0.0,
        min_hole_s=provider.min_hole_s,
        max_blocks=provider.max_blocks,
        spans_blocks=provider.site.spans_blocks,
        workers_per_node=max(1, workers_per_node),
    )

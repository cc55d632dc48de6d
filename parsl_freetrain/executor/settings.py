"""The settings of an executor, in groups."""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, structs
from parsl.data_provider.staging import Staging
from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD

from parsl_freetrain.core.allocation.constraints import EVERYBODY
from parsl_freetrain.core.allocation.objectives import objective_named
from parsl_freetrain.core.allocation.problem import Allocator
from parsl_freetrain.core.allocation.solvers import SolverName
from parsl_freetrain.core.controller.bids import candidate_of
from parsl_freetrain.core.controller.settings import ControllerSettings, DecisionPolicy
from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import MAX, PositiveSeconds, Seconds
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.host.network import address_of
from parsl_freetrain.integrations.metric_logger import MetricLogger
from parsl_freetrain.journal.usage import charged, used_node_s
from parsl_freetrain.sites.protocols import Site
from parsl_freetrain.sites.provider import BackfillProvider

INTERCHANGE = (sys.executable, '-P', '-m', 'parsl_freetrain.executor.interchange_process')
# Parsl does not quote the paths in it.
LAUNCH_CMD = re.sub(r'{(?:cert_dir|logdir|logconf)}', r"'\g<0>'", DEFAULT_LAUNCH_CMD).replace(
    'process_worker_pool.py', 'python3 -P -m parsl_freetrain.executor.block.manager'
)


class Policy(DecisionPolicy, frozen=True, kw_only=True):
    """The aim of decisions, their limits, and the solver that makes them.

    Attributes
    ----------
    metric, horizon_s, trainers_at_a_time, min_rescale_s, keep_free, max_nodes
        As in :class:`~parsl_freetrain.core.controller.settings.DecisionPolicy`.
    caps, min_shares, budgets, charge_budget, max_price, retries, idle_block_s, give_back_s, habits
        As in :class:`~parsl_freetrain.core.controller.settings.DecisionPolicy`.
    solver
        The solver's name ('auto', 'milp', 'equal-share', or 'dp' where all nodes are alike and
        stay), or an object with the method
        :meth:`~parsl_freetrain.core.allocation.problem.Allocator.allocate`. If the object has a
        method ``close()``, it is called when the executor shuts down.
    solver_time_limit_s
        Maximum seconds that a solver given by name may search; it then returns its best allocation.
    """

    solver: str | Allocator = 'auto'
    solver_time_limit_s: PositiveSeconds = 2.0

    @property
    def solver_name(self) -> str | None:
        return self.solver if isinstance(self.solver, str) else None

    def decisions(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DecisionPolicy.__struct_fields__}


class Timeouts(Settings, frozen=True, kw_only=True):
    """Time limits in seconds.

    Attributes
    ----------
    start_s
        From the decision to start a fragment to its first training step.
    stop_s
        From the request to stop a fragment to its end.
    hang_s
        From the moment when a rank is stopped, or a node or the network falls silent, to the end of
        the fragment; at least 2. A long training step does not count as a hang.
    step_s
        From one training step of a fragment to the next. A longer step counts as an endless loop.
    join_s
        From the start of a block to the first sign of one of its nodes. Then the block is given
        back, and another one is asked for later.
    peer_s
        From the first failed rank of a fragment to the end of its last rank.
    stop_grace_s
        For fragments to write a checkpoint at shutdown.
    adopt_s
        If the submitting process dies, its batch jobs wait this long for a new process with the
        same checkpoint_dir and label to adopt them. 0: the blocks end.
    """

    start_s: PositiveSeconds = 120.0
    stop_s: PositiveSeconds = 120.0
    hang_s: Annotated[float, Meta(ge=2, le=MAX, description='a number of seconds, 2 or more')] = (
        15.0
    )
    step_s: PositiveSeconds = 1800.0
    join_s: PositiveSeconds = 600.0
    peer_s: PositiveSeconds = 5.0
    stop_grace_s: Seconds = 6.0
    adopt_s: Seconds = 300.0

    @property
    def silence_s(self) -> float:
        """Maximum seconds without a sign of a node; the rest of ``hang_s`` is for ending."""
        return 0.8 * self.hang_s


class Recording(Settings, frozen=True, kw_only=True):
    """Where the record of a run goes.

    Attributes
    ----------
    ledger
        File that records the run: its journal. Default: ``ledger.journal`` in the executor's
        checkpoint_dir.
    loggers
        Where metrics go too: loggers of ``parsl_freetrain.integrations``.
    """

    ledger: str | None = None
    loggers: Sequence[MetricLogger] = ()


class HtexOptions(Settings, frozen=True, kw_only=True):
    """Options of Parsl's HighThroughputExecutor. Defaults are Parsl's unless stated here.

    Attributes
    ----------
    address, worker_port_range, interchange_port_range, worker_debug, encrypted, heartbeat_period
        As in :class:`parsl.executors.HighThroughputExecutor`. The default of ``address`` is that of
        the site's ``interface`` on this computer. Without it, the ports listen on every interface.
    heartbeat_threshold
        Seconds without a heartbeat after which a node counts as lost. Default: ``hang_s`` of the
        executor's time-outs, but at least three heartbeat periods.
    poll_period, worker_logdir_root, working_dir, storage_access
        As in :class:`parsl.executors.HighThroughputExecutor`.
    launch_cmd
        The command that starts the manager on each node, with Parsl's placeholders.
    interchange_launch_cmd
        The command that starts the interchange. It must pin tasks to nodes, as the default does.
    """

    address: str | None = None
    worker_port_range: tuple[int, int] = (54000, 55000)
    interchange_port_range: tuple[int, int] = (55000, 56000)
    worker_debug: bool = False
    encrypted: bool = True
    heartbeat_period: int = 5
    heartbeat_threshold: int | None = None
    poll_period: int = 100
    worker_logdir_root: str | None = None
    launch_cmd: str = LAUNCH_CMD
    working_dir: str | None = None
    storage_access: list[Staging] | None = None
    interchange_launch_cmd: tuple[str, ...] = INTERCHANGE

    def arguments(self, interface: str | None, hang_s: float) -> dict[str, Any]:
        """The arguments for HighThroughputExecutor; ``interface`` is the site's."""
        threshold = max(3 * self.heartbeat_period, math.ceil(hang_s))
        known = {'heartbeat_threshold': self.heartbeat_threshold or threshold}
        return {**structs.asdict(self), 'address': self.address or _address(interface), **known}


GROUPS: dict[str, type[Settings]] = {
    'recording': Recording, 'policy': Policy, 'timeouts': Timeouts, 'htex': HtexOptions
}  # fmt: skip


def _address(interface: str | None) -> str | None:
    """The address of a site's network on this computer; None if it has no such interface."""
    try:
        return address_of(interface) if interface else None
    except OSError:
        return None


def check_trainer(trainer: Trainer, metric: str, samples: int, at: float) -> None:
    """BadInput if the executor's metric has no value for a trainer and a node count."""
    for curve in dict(trainer.class_curves).values() or [trainer.curve]:
        objective_named(metric, 'metric')(
            candidate_of(trainer, Profile(curve).curve(trainer.max_nodes, 1.0), at, samples)
        )


def check_solver(policy: Policy, site: Site) -> None:
    """Refuse (BadInput) the dynamic programme where nodes are unequal or leave at several times."""
    if policy.solver_name != SolverName.DP:
        return
    classes = getattr(site, 'classes', ())
    if classes:
        differ = f'the classes of its nodes are {", ".join(classes)}'
    elif not site.spans_blocks:
        differ = 'its blocks cannot be mixed'
    elif not site.is_local or getattr(site, 'schedule', None) is not None:
        differ = 'its nodes leave at several times'
    else:
        return
    raise BadInput(
        f"Policy: the solver 'dp' cannot decide for the site {site.name!r}: {differ}. Take 'auto', "
        "which uses it for each decision to which it applies, or 'milp'."
    )


def check_classes(trainer: Trainer, site: Site) -> None:
    """Refuse (BadInput) a trainer whose curves name node classes that the site does not have."""
    classes = set(getattr(site, 'classes', ()))
    if classes and trainer.shapes:
        raise BadInput(
            f'Trainer {trainer.name!r}: several shapes for one node count cannot be tried where '
            'nodes are of several classes; give one shape for each count.'
        )
    for name, _ in trainer.class_curves:
        if name not in classes:
            has = f'has {", ".join(sorted(classes))}' if classes else 'does not tell nodes apart'
            raise BadInput(
                f'Trainer {trainer.name!r}: its speed is stated for the node class {name!r}; the '
                f'site {has}.'
            )


def controller_settings(
    policy: Policy, provider: BackfillProvider, ledger: Path, workers_per_node: int
) -> ControllerSettings:
    """Put them together, with what the ledger says was used; BadInput if no budget is left."""
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

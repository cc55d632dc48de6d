"""Sia's simulator with its policies or ours: ``python sia_simulation.py FOLDER WORKLOAD POLICY``
prints mean job completion hours and CPU seconds by solver as JSON.
"""

import contextlib
import importlib
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.objectives import Running
from parsl_freetrain.core.allocation.problem import Bid, Capacity, Problem
from parsl_freetrain.core.allocation.solvers.column_generation import ColumnAllocator
from parsl_freetrain.core.model.types import ScalingCurve

INTERVAL_S = 60
POLICIES = ('sia', 'gavel', 'rounded', 'exact', 'restart')
"""Their two policies; our solver for Sia's objective as they round it, and without rounding; and
with restarts charged as fair_goodput does.
"""


def solve(
    worth: NDArray[np.float64],
    configs: list[tuple[str, int]],
    gpus: dict[str, int],
    kept: dict[int, int],
) -> list[int | None]:
    """For each job, the index of its configuration in the best allocation.

    Parameters
    ----------
    worth
        Shape (jobs, configurations): what each is worth, 0 or less: not to be used.
    configs
        The class and the GPUs of each configuration.
    gpus
        Of each class.
    kept
        Jobs that cannot be moved now, and their configurations.
    """
    place = list(gpus)
    sizes = tuple(sorted({count for _, count in configs}))
    of_class = {
        name: [(i, count) for i, (at, count) in enumerate(configs) if at == name] for name in place
    }
    bids = []
    for j, row in enumerate(worth):
        held = [0] * len(place)
        if j in kept:
            name, count = configs[kept[j]]
            held[place.index(name)] = count
        curves = tuple(
            (
                name,
                ScalingCurve.from_points(
                    {0: 0.0, **dict.fromkeys(sizes, 0.0)}
                    | {count: max(float(row[i]), 0.0) for i, count in of_class[name]}
                ),
            )
            for name in place
        )
        bids.append(
            Bid(
                str(j), 1, sizes[-1], sum(held), 0.0, 0.0, curves[0][1], tuple(held), sizes,
                fixed=j in kept, class_curves=curves,
                current_class=configs[kept[j]][0] if j in kept else '',
            )
        )  # fmt: skip
    blocks = tuple(Capacity(name, count, node_class=name) for name, count in gpus.items())
    problem = Problem(1.0, sum(gpus.values()), tuple(bids), blocks)
    found = ColumnAllocator(60.0).allocate(problem).by_block
    index = {config: i for i, config in enumerate(configs)}
    chosen: list[int | None] = []
    for j in range(len(worth)):
        config = next((index[pair] for pair in found[str(j)].items() if pair in index), None)
        useful = config is not None and (j in kept or worth[j, config] > 0)
        chosen.append(config if useful else None)
    return chosen


def main(folder: str, workload: str, name: str) -> dict[str, Any]:
    """Simulate one workload."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    pd: Any = importlib.import_module('pandas')
    for old, new in (('int', int), ('float', float)):  # as numpy had them
        setattr(np, old, new)

    def append(frame: Any, row: Any, ignore_index: bool = True) -> Any:
        rows = row if isinstance(row, pd.DataFrame) else pd.DataFrame([row])
        return pd.concat([frame, rows], ignore_index=ignore_index)

    pd.DataFrame.append = append  # as pandas had it
    names = 'simulator_config', 'sia', 'gavel', 'cluster'
    modules: list[Any] = [importlib.import_module(name) for name in names]
    config, sia, gavel, cluster = modules
    config.sia_solver_verbose, config.sia_solver_num_threads = False, 1
    jobs: dict[str, Any] = {}
    done: dict[str, float] = {}  # seconds times speed-up
    theirs: list[float] = []
    ours: list[float] = []

    base: Any = sia.SiaPolicy

    class Policy(base):  # type: ignore[misc]
        """Their policy, whose solver is ours, or is compared with ours."""

        def _SiaPolicy__solve_mip_rescaled(
            self, params: Any, free: Any, weights: Any, blocked: Any
        ) -> Any:
            names, speedups, factors = params['adaptive']
            speedups, before = np.array(speedups, dtype=np.float64), self.prev_allocs_v2['adaptive']
            for j, job in enumerate(names):
                here = before.get(job)
                if here is None:
                    continue
                own = speedups[j, here]
                done[job] = done.get(job, 0.0) + own * INTERVAL_S
                speedups[j] *= after_restart(speedups[j], job) if name == 'restart' else factors[j]
                speedups[j, here] = own
            worth = config.sia_default_lambda_n - speedups**self.p_fairness
            if name in ('sia', 'rounded'):
                worth = config.sia_default_lambda_n - np.round(speedups**self.p_fairness, 2)
            kept = {names.index(job): before[job] for job in blocked['adaptive']}
            kinds = [(kind, int(count)) for kind, _, count in self.idx_to_config_map.values()]
            began = time.process_time()
            chosen = solve(worth, kinds, dict(self.cluster_total_gpus), kept)
            ours.append(time.process_time() - began)
            if name == 'sia':
                began = time.process_time()
                answer = super()._SiaPolicy__solve_mip_rescaled(params, free, weights, blocked)
                theirs.append(time.process_time() - began)
                mine = sum(worth[j, c] for j, c in enumerate(chosen) if c is not None)
                its = sum(
                    worth[j, c]
                    for j, job in enumerate(names)
                    if (c := self.prev_allocs_v2['adaptive'][job]) is not None
                )
                assert mine > its - 1e-3 * abs(its) - 1e-6, (mine, its)
                return answer
            allocations: dict[str, Any] = {}
            by_class: dict[str, dict[str, Any]] = {}
            for job, c in zip(names, chosen, strict=True):
                allocations[job] = None
                if c is not None:
                    kind, nodes, count = self.idx_to_config_map[c]
                    allocations[job] = kind, (int(nodes), int(count))
                    by_class.setdefault(kind, {})[job] = int(nodes), int(count)
            self.prev_allocs_v2['adaptive'] = dict(zip(names, chosen, strict=True))
            return allocations, by_class

    def after_restart(speedups: NDArray[np.float64], job: str) -> NDArray[np.float64]:
        """The share of the speed of each configuration that a restart leaves."""
        one, restart_s = jobs[job], sia.get_restart_penalty(job)
        application = next(iter(one.applications.values()))
        last = application.get_completion_epoch(application.init_batch_size)
        left = max(application.get_progress(last + 1) - one.progress, 0.0)
        rate = np.maximum(speedups * max(one.progress, 1e-9) / done[job], 1e-9)
        age_s = world.current_time - one.submission_time
        now = Running(0, '', restart_s, age_s, (one.num_restarts or 0) * restart_s)
        return np.array([now.after_restart(left_s) for left_s in (left / rate).tolist()])

    gpus = {kind: config.cluster_ngpus_per_node[kind] for kind in config.cluster_nnodes}
    if name == 'gavel':
        policy = gavel.GavelPolicy(INTERVAL_S, policy=config.gavel_default_policy)
    else:
        policy = Policy(
            p_fairness=-0.5, lambda_a=0.01, lambda_n=1.1, project_throughputs=True,
            share_max_replicas=True,
        )  # fmt: skip
    policy.populate_valid_configs(config.cluster_nnodes, gpus, config.cluster_max_physical_nnodes)
    world = cluster.Cluster(
        pd.read_csv(workload), policy, config.cluster_nnodes, gpus,
        max_physical_nodes=config.cluster_max_physical_nnodes,
    )  # fmt: skip
    jobs.update((job.name, job) for job in world.jobs)
    if name == 'gavel':
        world.disable_bsz_tuning()
    while not world.all_complete():
        world.step(INTERVAL_S)
    hours = list(world.get_jcts().values())
    return {
        'workload': workload,
        'policy': name,
        'jobs': len(hours),
        'mean_jct_h': round(statistics.mean(hours) / 3600, 4),
        'rounds': len(ours),
        'longest_jct_h': round(max(hours) / 3600, 4),
        'gpu_h': round(sum(job.attained_service for job in world.jobs) / 3600, 1),
        'restarts': sum(job.num_restarts or 0 for job in world.jobs),
        'ours_ms': [round(1e3 * q, 2) for q in np.quantile(ours, (0.5, 0.95)).tolist()]
        if ours
        else [],
        'theirs_ms': [round(1e3 * q, 2) for q in np.quantile(theirs, (0.5, 0.95)).tolist()]
        if theirs
        else [],
    }


if __name__ == '__main__':
    with contextlib.redirect_stdout(io.StringIO()):  # the simulator prints every round
        result = main(str(Path(sys.argv[1]).resolve()), *sys.argv[2:4])
    print(json.dumps(result))

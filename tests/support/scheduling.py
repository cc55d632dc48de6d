"""In which order test files are begun: long files first, so that none is left for the end.

Files that need a PBS server stay together on one worker: there is one server at a time on a
computer, and a worker that waited for it could run nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

# The longest first, those that mostly wait (for a scheduler, a time limit, a download) mixed with
# those that compute, so that the processors are never without work. Files that are not named here
# take less than half a minute.
LONG = (
    'tests/sites/pbspro/test_openpbs.py',
    'tests/globus/test_in_its_environment.py',
    'tests/slurm/test_zero_delay.py',
    'tests/slurm/test_whole_training.py',
    'tests/executor/test_endings.py',
    'tests/slurm/test_known_plans.py',
    'tests/test_interruption.py',
    'tests/integrations/test_whole_scripts.py',
    'tests/sites/slurm/test_slurm_live.py',
    'tests/test_demo.py',
    'tests/executor/test_hangs.py',
    'tests/executor/test_computers.py',
    'tests/slurm/test_adoption.py',
    'tests/chaos/test_chaos.py',
    'tests/test_divided.py',
    'tests/test_ffn.py',
    'tests/test_gpt_sharded.py',
    'tests/replay/test_evidence.py',
    'tests/sites/slurm/test_slurm_blocks.py',
    'tests/test_app.py',
    'tests/docs/test_first_site.py',
    'tests/test_chimera_gpt.py',
    'tests/executor/test_training.py',
    'tests/core/allocation/test_columns.py',
    'tests/replay/test_sweep.py',
    'tests/executor/test_device_faults.py',
    'tests/replay/test_recorded_run.py',
    'tests/executor/test_run_lock.py',
    'tests/executor/test_memory.py',
    'tests/training/comm/test_addresses.py',
    'tests/training/process/test_lazy_dynamo.py',
    'tests/core/allocation/test_allocation.py',
    'tests/training/loop/test_handover.py',
    'tests/slurm/test_load.py',
    'tests/conformance/test_parsl_suite.py',
    'tests/integrations/test_transformers.py',
    'tests/integrations/test_lightning.py',
    'tests/executor/test_interchange.py',
    'tests/training/parallel/test_pipeline.py',
    'tests/sites/pbspro/test_pbs_blocks.py',
    'tests/cli/test_report.py',
    'tests/sites/test_site_contract.py',
    'tests/cli/doctor/test_doctor.py',
    'tests/cli/test_looking.py',
    'tests/cli/test_run.py',
    'tests/executor/test_rescale.py',
    'tests/training/process/test_liveness.py',
    'tests/training/process/test_fork_server.py',
    'tests/training/process/test_fork_client.py',
)
# The first of them stands for all in LONG.
PBS = (
    'tests/sites/pbspro/test_openpbs.py',
    'tests/sites/test_batch_training.py',
    'tests/pbs/test_zero_delay.py',
    'tests/cli/doctor/test_site.py',
)


def place(unit: str) -> int:
    """Return the place of a file, or of the files that need PBS, in the order in which they are
    begun.
    """
    return LONG.index(unit) if unit in LONG else len(LONG)


def units(items: Sequence[pytest.Item], root: Path) -> list[list[pytest.Item]]:
    """Divide tests into what one worker runs one after the other: a file, or all that need PBS."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        file = str(item.path.relative_to(root))
        found.setdefault(PBS[0] if file in PBS else file, []).append(item)
    return [found[file] for file in sorted(found, key=place)]

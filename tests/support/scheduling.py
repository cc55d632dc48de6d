"""In which order tests begin: the short forms, file by file, then the long ones, each by itself;
of both those that take long first. What shares a server is on one worker.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

# The longest first, those that mostly wait (for a scheduler, a time limit, a download) mixed with
# those that compute, so that the processors are never without work.
FIRST = (
    'tests/globus/test_in_its_environment.py',
    'tests/sites/pbspro/test_openpbs.py',
    'tests/sites/slurm/test_slurm_blocks.py',
    'tests/sites/slurm/test_slurm_live.py',
    'tests/test_workflows.py',
    'tests/slurm/test_zero_delay.py',
    'tests/test_ffn.py',
    'tests/chaos/test_chaos.py',
    'tests/slurm/test_load.py',
    'tests/slurm/test_whole_training.py',
    'tests/integrations/test_whole_scripts.py',
    'tests/training/loop/test_kinds_of_state.py',
    'tests/test_divided.py',
    'tests/test_demo.py',
    'tests/globus/test_client.py',
    'tests/executor/test_hangs.py',
    'tests/training/loop/test_handover.py',
    'tests/executor/test_endings.py',
    'tests/training/loop/test_fragments.py',
    'tests/test_calls.py',
    'tests/executor/test_training.py',
    'tests/slurm/test_adoption.py',
    'tests/gpu/test_gpu.py',
    'tests/training/loop/test_sharded_handover.py',
    'tests/executor/test_computers.py',
    'tests/docs/test_guides.py',
    'tests/training/parallel/test_sharded.py',
    'tests/training/parallel/test_pipeline.py',
    'tests/training/loop/test_rounds.py',
    'tests/core/allocation/test_allocation.py',
    'tests/replay/test_evidence.py',
    'tests/cli/test_run.py',
    'tests/test_app.py',
    'tests/conformance/test_parsl_suite.py',
    'tests/training/process/test_liveness.py',
    'tests/training/process/test_fork_server.py',
    'tests/executor/test_run_lock.py',
    'tests/executor/test_interchange.py',
    'tests/chaos/test_waits.py',
    'tests/cli/doctor/test_doctor.py',
    'tests/cli/test_looking.py',
)
PBS, SLURM = 'tests/sites/pbspro/test_openpbs.py', 'tests/sites/slurm/test_slurm_blocks.py'
"""They stand for all tests of other files, too, that share a server of PBS or a Slurm cluster."""
APART = 'tests/slurm/', 'tests/docs/', 'tests/sites/slurm/test_slurm_live.py'
"""Where tests have a Slurm cluster for long, or of their own."""


def place(unit: str) -> int:
    """The place of a file, or of the files that share a cluster, in the order of their begin."""
    return FIRST.index(unit) if unit in FIRST else len(FIRST)


def unit_of(item: pytest.Item, root: Path) -> str:
    """The file that stands for what is run by the same worker as this test."""
    file = str(item.path.relative_to(root))
    if item.get_closest_marker('pbs'):
        return PBS
    return SLURM if item.get_closest_marker('slurm') and not file.startswith(APART) else file


def units(items: Sequence[pytest.Item], root: Path) -> list[list[pytest.Item]]:
    """Divide tests into what one worker runs one after the other."""
    found: dict[tuple[bool, int, str], list[pytest.Item]] = {}
    for item in items:
        unit = unit_of(item, root)
        # There is one PBS server at a time: what needs it takes longest of all, and mostly waits.
        later = unit != PBS and item.get_closest_marker('long') is not None
        alone = later and unit != SLURM
        found.setdefault((later, place(unit), item.nodeid if alone else unit), []).append(item)
    return [found[key] for key in sorted(found, key=lambda key: key[:2])]

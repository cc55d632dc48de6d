"""Which worker runs which test file: long files first, so that none is left for the end.

A file stays on one worker, so that its tests share their fixtures. xdist by itself would begin with
the files that have most tests, and would queue a second long file behind the first one.

Files that need a PBS server stay on one worker, too: there is one server at a time on a computer,
and a worker that waited for it could run nothing else.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# The longest first, those that mostly wait (for a scheduler, a time limit, a download) mixed with
# those that compute, so that the processors are never without work. Files that are not named here
# take less than half a minute.
LONG = (
    'tests/sites/pbspro/test_openpbs.py',
    'tests/slurm/test_zero_delay.py',
    'tests/test_house.py',
    'tests/executor/test_hangs.py',
    'tests/chaos/test_chaos.py',
    'tests/globus/test_in_its_environment.py',
    'tests/test_docs.py',
    'tests/slurm/test_whole_training.py',
    'tests/test_ffn.py',
    'tests/slurm/test_known_plans.py',
    'tests/test_chimera_gpt.py',
    'tests/test_gpt_sharded.py',
    'tests/sites/slurm/test_slurm_blocks.py',
    'tests/test_divided.py',
    'tests/test_interruption.py',
    'tests/test_app.py',
    'tests/test_demo.py',
    'tests/executor/test_training.py',
    'tests/sites/slurm/test_slurm_live.py',
    'tests/executor/test_endings.py',
    'tests/slurm/test_adoption.py',
    'tests/core/allocation/test_allocation.py',
    'tests/training/loop/test_handover.py',
    'tests/slurm/test_load.py',
    'tests/conformance/test_parsl_suite.py',
    'tests/integrations/test_transformers.py',
    'tests/integrations/test_lightning.py',
    'tests/executor/test_interchange.py',
    'tests/training/parallel/test_pipeline.py',
    'tests/sites/pbspro/test_pbs_blocks.py',
    'tests/docs/test_first_site.py',
    'tests/cli/test_report.py',
    'tests/sites/test_site_contract.py',
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


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    """Hands out the longest file that is left, and with each long one also a short one.

    A worker begins its last test only when it knows what comes next: a short file is kept waiting
    then, not another long one.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return PBS[0] if file in PBS else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        self._assign(min(self.workqueue, key=place), node)
        short = [file for file in self.workqueue if file not in LONG]
        if short and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign(short[-1], node)

    def _assign(self, file: str, node: WorkerController) -> None:
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

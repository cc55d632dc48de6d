"""Sia's problem (SOSP 2023): its simulator with its own policies and with ours; run by
``make bench BENCH_ARGS=tests/benchmarks/test_sia.py``. Nothing is asserted.

``SIA_SIMULATOR`` is the folder of the simulator (github.com/siasosp23/artifacts), ``SIA_WORKLOAD``
a workload in it, and ``SIA_PACKAGES`` a folder with cvxpy, cylp, ecos, autograd, pandas and rich:
``pip install --target FOLDER``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import sia_simulation

REPOSITORY = Path(__file__).resolve().parents[2]
SIMULATOR = os.environ.get('SIA_SIMULATOR', '')


@pytest.mark.skipif(not SIMULATOR, reason='SIA_SIMULATOR does not name the simulator')
@pytest.mark.parametrize('policy', sia_simulation.POLICIES)
def test_a_workload_of_sia(policy: str) -> None:
    workload = os.environ.get('SIA_WORKLOAD', 'workloads/philly/workload-1.csv')
    paths = str(REPOSITORY), os.environ.get('SIA_PACKAGES', '')
    done = subprocess.run(
        [sys.executable, sia_simulation.__file__, SIMULATOR, workload, policy],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths), 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout, flush=True)

"""Sia's problem (SOSP 2023), with its own policies and ours. ``SIA_SIMULATOR``: folder of the
simulator (github.com/siasosp23/artifacts); ``SIA_WORKLOAD``: a workload in it; ``SIA_PACKAGES``:
``pip install --target FOLDER cvxpy cylp ecos autograd pandas rich``.
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
    words = [sys.executable, sia_simulation.__file__, SIMULATOR, workload, policy]
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)

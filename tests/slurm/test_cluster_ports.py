"""The ports of the tests' Slurm clusters."""

import re
from pathlib import Path

import pytest

from tests.support.programs import run_to_end

SCRIPT = Path(__file__).resolve().parents[1] / 'support' / 'slurm-cluster'


@pytest.mark.parametrize(('base', 'taken'), [(17000, ''), (17100, '17100\n')])
def test_those_of_a_pbs_server_are_left_alone(base: int, taken: str) -> None:
    """PBS knows no other port than 17001 for one of its daemons, and does not start without it."""
    function = re.search(r'^free_ports\(\) .*?^}', SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert function is not None
    only = f'ss() {{ :; }}; shuf() {{ grep -x {base}; }}'  # nothing listens; one block is looked at
    done = run_to_end(['bash', '-c', f'{function[0]}\n{only}; free_ports 5'])
    assert (done.stdout, done.stderr) == (taken, '')

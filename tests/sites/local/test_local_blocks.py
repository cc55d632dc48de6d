"""Real blocks: real processes, taken, cancelled and orphaned."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parsl.jobs.states import JobState

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.idle_schedule import IdleInterval, Schedule
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider
from tests.support.processes import alive
from tests.support.waiting import wait_until

# A node that runs on: itself, a child in its group, and one that has left for a session of its own.
# Each writes its process id; SIGTERM does not end them.
NODE = """trap '' TERM
export FOLDER={folder}
echo $$ > "$FOLDER/$FREETRAIN_NODE.shell"
(trap '' TERM; echo $BASHPID > "$FOLDER/$FREETRAIN_NODE.child"; while true; do sleep 600; done) &
setsid bash -c 'trap "" TERM; echo $$ > "$FOLDER/$FREETRAIN_NODE.stray"
while true; do sleep 600; done' &
echo "I am $FREETRAIN_NODE, devices: $FREETRAIN_SLOT_DEVICES"
while true; do sleep 600; done
"""
KINDS = ('shell', 'child', 'stray')


class Blocks:
    """A provider whose blocks are cancelled at the end, and what their nodes write."""

    def __init__(self, folder: Path, site: LocalSite, **more: Any) -> None:
        self.folder = folder
        self.pids_folder = folder / 'pids'
        self.pids_folder.mkdir(exist_ok=True)
        self.site = site
        self.provider = BackfillProvider(site, **more)
        self.provider.script_dir = str(folder)
        self.jobs: list[str] = []
        site.start()

    def open(self, *nodes: str, command: str | None = None, name: str = 'block') -> str:
        text = (
            NODE.format(folder=shlex.quote(str(self.pids_folder))) if command is None else command
        )
        self.jobs.append(
            self.provider.open_block(BlockRequest(len(nodes), names=nodes), text, name)
        )
        return self.jobs[-1]

    def pids(self, *nodes: str) -> list[int]:
        """Of every process of these nodes, as soon as all are there."""
        files = [self.pids_folder / f'{node}.{kind}' for node in nodes for kind in KINDS]
        wait_until(lambda: all(file.exists() and file.read_text().endswith('\n') for file in files))
        return [int(file.read_text()) for file in files]

    def status(self, job: str) -> Any:
        return self.provider.status([job])[0]

    def end(self) -> dict[str, Any]:
        (file,) = self.folder.glob('*.end.json')
        document: dict[str, Any] = json.loads(file.read_text())
        return document


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    folder = tmp_path / "a run's folder"
    folder.mkdir()
    made = Blocks(folder, LocalSite(2))
    yield made
    made.provider.cancel(made.jobs)


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


def test_a_block_runs_the_command_once_per_node_in_sessions_of_their_own(blocks: Blocks) -> None:
    job = blocks.open('slot00', 'slot01')
    pids = blocks.pids('slot00', 'slot01')
    assert all(alive(pid) for pid in pids)
    assert blocks.status(job).state == JobState.RUNNING
    assert len({os.getsid(pid) for pid in (pids[0], pids[3])} | {os.getsid(0)}) == 3
    (out,) = blocks.folder.glob('block.*.slot01.out')
    wait_until(lambda: out.read_text() == 'I am slot01, devices: share 1 2\n')
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in blocks.folder.glob('block.*'))


def test_nodes_are_taken_by_sigkill_at_the_end_of_the_first_ones_interval(tmp_path: Path) -> None:
    schedule = Schedule([IdleInterval(0, 3, 'a'), IdleInterval(0, 600, 'b')])
    blocks = Blocks(tmp_path, LocalSite(2, schedule))
    try:
        begun = time.time()
        job = blocks.open('a', 'b')
        pids = blocks.pids('a', 'b')
        wait_until(lambda: blocks.status(job).terminal)
        assert gone(pids)
        assert blocks.status(job).state == JobState.TIMEOUT
        end = blocks.end()
        assert end['how'] == 'taken'
        assert end['at'] >= begun + 2.9
        assert end['exit_codes'] == {'a': -signal.SIGKILL, 'b': -signal.SIGKILL}
        assert [hole.names for hole in blocks.site.holes()] == [('b',)]
    finally:
        blocks.provider.cancel(blocks.jobs)


def test_cancel_leaves_no_process_when_it_returns(blocks: Blocks) -> None:
    job = blocks.open('slot00', 'slot01')
    pids = blocks.pids('slot00', 'slot01')
    assert blocks.provider.cancel([job]) == [True]
    assert gone([*pids, int(job)])
    assert blocks.status(job).state == JobState.CANCELLED
    assert blocks.end()['how'] == 'cancelled'
    assert sum(hole.nodes for hole in blocks.site.holes()) == 2


def test_cancel_right_after_the_submission_leaves_nothing(blocks: Blocks) -> None:
    for _ in range(3):
        job = blocks.open('slot00', 'slot01')
        assert blocks.provider.cancel([job]) == [True]
        assert not alive(int(job))
    assert gone([int(f.read_text()) for f in blocks.pids_folder.iterdir() if f.read_text()])


def test_ctrl_c_does_not_reach_the_block(blocks: Blocks) -> None:
    job = blocks.open('slot00')
    pids = blocks.pids('slot00')
    assert os.getpgid(int(job)) != os.getpgrp()
    os.kill(int(job), signal.SIGINT)
    os.kill(int(job), signal.SIGHUP)
    # It would answer to these first.
    second = blocks.open('slot01', command='true')
    wait_until(lambda: blocks.status(second).terminal)
    assert blocks.status(job).state == JobState.RUNNING
    assert all(alive(pid) for pid in pids)


def test_a_block_whose_own_process_is_killed_takes_its_nodes_along(blocks: Blocks) -> None:
    job = blocks.open('slot00', 'slot01')
    pids = blocks.pids('slot00', 'slot01')
    os.kill(int(job), signal.SIGKILL)
    wait_until(lambda: blocks.status(job).terminal)
    assert blocks.status(job).state == JobState.FAILED
    assert Path(blocks.status(job).message.split(' and ')[-1]).suffix == '.err'
    assert gone(pids)


def test_the_death_of_the_owner_ends_the_block(tmp_path: Path) -> None:
    program = f"""
import sys, time
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider
site = LocalSite(2)
site.start()
provider = BackfillProvider(site)
provider.script_dir = {str(tmp_path)!r}
node = {NODE.format(folder=shlex.quote(str(tmp_path)))!r}
print(provider.open_block(BlockRequest(2), node, 'block'), flush=True)
time.sleep(600)
"""
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, '-c', program], cwd=root, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        job = int(owner.stdout.readline())
        files = [tmp_path / f'{node}.{kind}' for node in ('slot00', 'slot01') for kind in KINDS]
        wait_until(lambda: all(file.exists() and file.read_text().endswith('\n') for file in files))
        pids = [job, *(int(file.read_text()) for file in files)]
        assert all(alive(pid) for pid in pids)
        # Not reaped yet: a zombie owner is dead as well.
        owner.kill()
        wait_until(lambda: gone(pids))
    (end,) = tmp_path.glob('*.end.json')
    assert json.loads(end.read_text())['how'] == 'orphaned'


def test_the_exit_status_of_the_command_becomes_the_blocks(blocks: Blocks) -> None:
    good = blocks.open('slot00', command='exit 0')
    bad = blocks.open('slot01', command='echo why >&2; exit 7')
    wait_until(lambda: blocks.status(good).terminal and blocks.status(bad).terminal)
    assert blocks.status(good).state == JobState.COMPLETED
    assert (blocks.status(bad).state, blocks.status(bad).exit_code) == (JobState.FAILED, 7)
    assert Path(blocks.status(bad).message.split(' and ')[-1]).read_text() == 'why\n'


def test_a_command_with_every_character_arrives_as_it_is(blocks: Blocks) -> None:
    text = """'"$`\\ *;|&<>\t!#ü"""
    command = (
        f"printf '%s\\n' {shlex.quote(text)}\n# not reached by any other shell: ' \" $(kill "
        '$$) `kill $$`'
    )
    job = blocks.open('slot00', command=command, name="it's a $(block)")
    wait_until(lambda: blocks.status(job).terminal)
    (out,) = blocks.folder.glob('*.slot00.out')
    assert out.read_text() == text + '\n'
    assert blocks.status(job).state == JobState.COMPLETED


def test_a_block_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, LocalSite(2))
    blocks.provider.script_dir = str(tmp_path / 'missing')
    with pytest.raises(FreeTrainError, match='could not be started: .*missing'):
        blocks.open('slot00')
    assert sum(hole.nodes for hole in blocks.site.holes()) == 2

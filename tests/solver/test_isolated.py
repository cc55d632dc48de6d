"""Solvers by name; one that crashes or hangs costs one decision, and nothing else."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from parsl_freetrain.core.allocation.feasibility import by_place, stay_put
from parsl_freetrain.core.allocation.problem import Capacity, Limit, Problem
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.solver import allocator_named, close_allocator
from parsl_freetrain.solver.isolated import IsolatedAllocator
from tests.support.allocation import bid
from tests.support.programs import Program, run_to_end
from tests.support.solvers import Wayward, children
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
GOOD = Problem(120.0, 8, (bid('good', 2), bid('b', 3)))


def problem(what: str) -> Problem:
    return Problem(120.0, 8, (bid(what, 2), bid('b', 3)))


@pytest.fixture
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IsolatedAllocator]:
    monkeypatch.setenv('PYTHONPATH', str(ROOT))  # where the child finds the tests' own allocator
    monkeypatch.chdir(tmp_path)
    Path('random.py').write_text('raise ImportError("a user has another one here")')
    allocator = IsolatedAllocator(Wayward(), time_limit_s=0.2, margin_s=0.3)
    yield allocator
    allocator.close()


def child() -> psutil.Process:
    (found,) = children()
    return found


@pytest.mark.parametrize(
    ('what', 'said'),
    [
        ('abort', f'ended with status -{int(signal.SIGABRT)}'),
        ('hang', 'killed after 0.5 seconds'),
        ('raise', 'no licence'),
    ],
)
def test_what_runs_is_kept_and_the_next_question_is_answered(
    isolated: IsolatedAllocator, caplog: pytest.LogCaptureFixture, what: str, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = isolated.allocate(problem(what))
    assert answer.status == 'feasible'
    assert by_place(problem(what), answer) == stay_put(problem(what))
    assert answer.objective == answer.staying == problem(what).objective(answer.allocation)
    assert said in caplog.text
    assert isolated.allocate(GOOD).status == 'optimal'


def test_one_child_answers_all_questions(isolated: IsolatedAllocator) -> None:
    pids = {isolated.allocate(problem('pid')).objective for _ in range(3)}
    assert pids == {float(child().pid)}
    child().kill()
    assert isolated.allocate(problem('pid')).solver == 'milp'  # nobody answered
    assert isolated.allocate(problem('pid')).objective not in pids


def test_no_child_before_the_first_question_and_none_after_the_end(
    isolated: IsolatedAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    isolated.close()
    other = IsolatedAllocator(MilpAllocator(), 10.0)
    assert children() == []
    assert other.allocate(GOOD).status == 'optimal'
    process = child()
    other.close()
    assert not process.is_running()
    assert by_place(GOOD, other.allocate(GOOD)) == stay_put(GOOD)
    assert children() == []
    assert caplog.text == ''


def test_close_does_not_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    allocator = IsolatedAllocator(Wayward(), time_limit_s=500.0)
    assert allocator.allocate(GOOD).status == 'optimal'
    answers: list[str] = []
    asking = threading.Thread(
        target=lambda: answers.append(allocator.allocate(problem('hang')).status)
    )
    asking.start()
    while child().status() != psutil.STATUS_SLEEPING or child().cpu_times().user == 0.0:
        time.sleep(0.01)
    allocator.close()
    asking.join(LIMIT_S)
    assert answers == ['feasible']


def test_the_child_inherits_nothing_of_ours(isolated: IsolatedAllocator, tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with socket.create_server(('127.0.0.1', 0)) as server, (tmp_path / 'open').open('w') as file:
        os.set_inheritable(server.fileno(), True)
        os.set_inheritable(file.fileno(), True)
        try:
            answer = isolated.allocate(problem('open files'))
        finally:
            stop.set()
            thread.join()
    assert answer.objective == 1.0
    sockets = [name for name in answer.allocation if name.startswith('socket:')]
    assert len(sockets) <= 1  # its end of the pipe
    assert str(file.name) not in answer.allocation


PARENT = """
import sys, threading
from parsl_freetrain.solver.isolated import IsolatedAllocator
from tests.support.allocation import bid
from tests.support.solvers import Wayward
from parsl_freetrain.core.allocation.problem import Problem
allocator = IsolatedAllocator(Wayward(), time_limit_s=float(sys.argv[1]), margin_s=0.5)
print(int(allocator.allocate(Problem(120.0, 8, (bid('pid'),))).objective), flush=True)
sys.stdin.readline()
allocator.allocate(Problem(120.0, 8, (bid(sys.argv[2]),)))
"""


@pytest.mark.parametrize('what', ['good', 'hang'])
def test_the_child_ends_when_its_parent_is_killed(what: str) -> None:
    with Program([sys.executable, '-c', PARENT, '1.0', what], cwd=ROOT) as parent:
        process = psutil.Process(int(parent.said()))
        if what == 'hang':
            parent.stdin.write('\n')
            parent.stdin.flush()
            while 'SigBlk:\t0000000000000000' in Path(f'/proc/{process.pid}/status').read_text():
                time.sleep(0.01)  # until it hangs
        parent.kill()
    process.wait(LIMIT_S)


def test_what_a_solver_prints_stays_out_of_the_answers() -> None:
    script = (
        'from parsl_freetrain.solver import allocator_named, close_allocator\n'
        'from tests.support.allocation import bid\n'
        'from parsl_freetrain.core.allocation.problem import Problem\n'
        "a = allocator_named('milp')\n"
        "print(a.allocate(Problem(120.0, 8, (bid('x'),))).status)\n"
    )
    done = run_to_end([sys.executable, '-c', script], cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == ('optimal\n', '')


SIMPLE = Problem(120.0, 8, (bid('a', 2), bid('b', 3), bid('c')))
TOGETHER = replace(SIMPLE, limits=(Limit(('a', 'b'), most=4),))
ENDING = replace(SIMPLE, blocks=(Capacity('x', 5, 60.0), Capacity('y', 3)))


def test_who_answers() -> None:
    for name, problem, solver in (
        ('auto', SIMPLE, 'dp'),
        ('auto', TOGETHER, 'milp'),
        ('auto', ENDING, 'columns'),
        ('auto', replace(ENDING, spans_blocks=False), 'milp'),
        ('dp', SIMPLE, 'dp'),
        ('milp', SIMPLE, 'milp'),
        ('milp', ENDING, 'milp'),
        ('equal-share', SIMPLE, 'equal-share'),
        ('equal-share', ENDING, 'equal-share'),
    ):
        allocator = allocator_named(name, isolated=False)
        assert allocator.allocate(problem).solver == solver
        close_allocator(allocator)


def test_auto_starts_a_process_only_when_it_needs_the_milp() -> None:
    allocator = allocator_named('auto')
    assert allocator.allocate(SIMPLE).solver == 'dp'
    assert children() == []
    answer = allocator.allocate(TOGETHER)
    assert len(children()) == 1
    close_allocator(allocator)
    assert children() == []
    assert (
        answer.allocation == allocator_named('milp', isolated=False).allocate(TOGETHER).allocation
    )


def test_an_unknown_name_and_a_bad_limit() -> None:
    with pytest.raises(BadInput, match="'greedy'; choose one of auto, milp, dp, equal-share"):
        allocator_named('greedy')
    with pytest.raises(BadInput, match='time limit'):
        allocator_named('auto', time_limit_s=float('nan'))

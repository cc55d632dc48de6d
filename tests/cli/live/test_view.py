"""The live view: what it shows, at any width, on a terminal and elsewhere."""

import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from parsl_freetrain.cli.live.view import (
    ClosingTable,
    LiveView,
    Screen,
    metric_table,
    plain_lines,
    sparkline,
)
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import BlockEndKnown
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.status import DecisionNow
from parsl_freetrain.report.summary import summary
from tests.support.journals import demo_journal
from tests.support.told import Told
from tests.support.waiting import LIMIT_S
from workflows.live_view import run_live


class Watched(io.StringIO):
    """Text that tells when something has been written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.strip():
            self.written.set()
        return count


def shown(renderable: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return out.getvalue()


def running(path: Path) -> Told:
    """``cnn`` on both nodes of b0 and one of b1, ``mlp`` waits; b2 has no node yet. It is 1030."""
    ledger = Told(path)
    ledger.begin_run('r0', at=1000)
    ledger.offered((n, 1000, 1100) for n in 'xyz')
    for name in ('cnn', 'mlp'):
        ledger.submitted(name, at=1000, spec={'min_nodes': 1, 'max_nodes': 3}, total_samples=50_000)
    for block, names, walltime in (('b0', 'xy', 100.0), ('b1', 'z', None), ('b2', '', 60.0)):
        size = max(1, len(names))
        ledger.block_opened(block, at=1000, nodes=size, walltime_s=walltime, names=list(names))
        for name in names:
            ledger.joined(f'{block}/{name}', at=1001, block=block, name=name)
    ledger.fragment_decided('cnn', 1, at=1002, nodes=['b0/x'])
    ledger.fragment_started('cnn', 1, at=1003, samples=0)
    ledger.fragment_ended('cnn', 1, at=1010, ending='preempted', samples=0, reached=700)
    nodes = ['b0/x', 'b0/y', 'b1/z']
    ledger.fragment_decided('cnn', 2, at=1010, nodes=nodes)
    ledger.fragment_started('cnn', 2, at=1012, samples=0)
    loss = {'loss': 0.4321}
    ledger.fragment_progress('cnn', 2, at=1030, samples=12_500, rate=690.0, metrics=loss)
    ledger.commit()
    return ledger


@pytest.mark.parametrize('width', [40, 80])
def test_the_view_fits_its_console_and_says_all(tmp_path: Path, width: int) -> None:
    ledger = running(tmp_path / 'l.db')
    with Journal(tmp_path / 'l.db') as journal:
        text = shown(Screen(LiveView(journal, MilpAllocator()).snapshot(1030.0)), width)
    ledger.close()
    assert all(len(line) <= width for line in text.splitlines())
    words = 'cnn', 'running', 'mlp', 'queued', '12.5k/50k', '0.4321', '690/s', 'b0', '1:10'
    for word in (*words, 'unknown', 'starting'):
        assert word in text
    assert ('trainer ' in text) == (width >= 80)
    assert '…' not in text


def test_what_is_shown_is_what_the_ledger_says(tmp_path: Path) -> None:
    ledger = running(tmp_path / 'l.db')
    with Journal(tmp_path / 'l.db') as journal:
        view = LiveView(journal, MilpAllocator())
        seen = view.snapshot(1030.0)
        cnn, mlp = seen.trainers
        assert (cnn.nodes, cnn.samples, cnn.total) == (3, 12_500, 50_000)
        assert (cnn.loss, cnn.rate) == (0.4321, 690.0)
        assert (cnn.fragments, cnn.preempted, cnn.rescaled) == (2, 1, 1)
        assert (mlp.nodes, mlp.samples, mlp.loss, mlp.rate, mlp.fragments) == (0, 0, None, None, 0)
        plain = LiveView(journal).snapshot(1030.0).trainers[0]
        assert cnn.efficiency is not None and plain.efficiency is None
        assert [(b.name, b.trainers, b.left_s) for b in seen.blocks] == [
            ('b0', ('cnn',), 70.0), ('b1', ('cnn',), None), ('b2', (), 30.0)]  # fmt: skip
        assert 'silent' in shown(Screen(view.snapshot(1200.0)), 80)

        assert seen.decision is None
        ledger.decision(
            1030, trigger='Tick', nodes=3, status='feasible', solver='columns', objective=99.0,
            bound=100.0, seconds=1.0, staying=9.0, current={}, allocation={'cnn': 3},
        )  # fmt: skip
        ledger.commit()
        assert view.snapshot(1031.0).decision == DecisionNow(1.0, 'feasible', 'columns', 0.01)
        for width in (40, 80):
            assert '0:31  4 nodes  decision -1 %' in shown(Screen(view.snapshot(1031.0)), width)
        ledger.take(BlockEndKnown(1030, 'b1', 1040.0))
        ledger.block_closed('b2', at=1031, how='cancelled')
        ledger.commit()
        left = [(b.name, b.left_s) for b in view.snapshot(1031.0).blocks]
        assert left == [('b0', 69.0), ('b1', 9.0)]
        ledger.end_run(at=1032, how='interrupted')
        text = shown(Screen(view.snapshot(1200.0)), 80)
        assert 'ended: interrupted' in text and 'b0' not in text and '0:32' in text
    ledger.close()


def test_names_cannot_paint_the_terminal(tmp_path: Path) -> None:
    ledger = Told(tmp_path / 'l.db')
    ledger.begin_run('r0', at=1000)
    ledger.submitted('[red]x[/red]\x1b[2J\r\n', at=1000)
    ledger.block_opened('b\x07', at=1000, nodes=1)
    ledger.commit()
    with Journal(tmp_path / 'l.db') as journal:
        view = LiveView(journal)
        pieces = [shown(Screen(view.snapshot(1001.0)), w) for w in (40, 120)] + [
            shown(ClosingTable(summary(journal.history())), 120)
        ]
        pieces += plain_lines(view.snapshot(1001.0))
    ledger.close()
    for text in pieces:
        assert '[red]x[/red]' in text and not re.search(r'[\x00-\x09\x0b-\x1f]', text)


@pytest.mark.parametrize('width', [40, 80])
def test_the_closing_table(tmp_path: Path, width: int) -> None:
    with Journal(demo_journal(tmp_path / 'l.db', seconds=40.0)) as journal:
        found = summary(journal.history())
    plain = shown(ClosingTable(found), width)
    assert 'accuracy' not in plain
    equal = {'accuracy': 0.9777, 'accuracy_undisturbed': 0.9777, 'weights_equal': True}
    found['trainers']['cnn'] |= equal
    other = {'accuracy': 0.95, 'accuracy_undisturbed': 0.96, 'weights_equal': False}
    found['trainers']['mlp'] |= other
    text = shown(ClosingTable(found), width)
    samples = f'{found["trainers"]["cnn"]["samples"]:,}/60,000'
    for word in ('cnn', '97.77%', 'equal', 'mlp', '96.00%', 'DIFFER', samples):
        assert word in text
    assert f'killed while training: {found["blocks_killed"]}' in text
    assert all(len(line) <= width for line in text.splitlines()) and '…' not in text


@contextmanager
def in_background(show: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=show, name='live')
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    out, stop, path = Watched(), threading.Event(), tmp_path / 'l.db'
    console = Console(file=out, width=40)
    pace = partial(run_live, refresh_s=0.02, plain_s=0.05, clock=lambda: 1030.0)
    show = partial(pace, path, stop, console)
    with in_background(show, stop):
        ledger = running(path)  # only now is there a ledger
        assert out.written.wait(LIMIT_S)
    ledger.close()
    lines = out.getvalue().splitlines()
    assert lines[-2].startswith('0:30 cnn: running, 3 nodes, 12.5k/50k samples, loss 0.4321, 690/s')
    assert lines[-1].startswith('0:30 mlp: queued, 0 nodes')
    assert '\x1b' not in out.getvalue()


def test_on_a_terminal_it_is_drawn_anew_until_stopped(tmp_path: Path) -> None:
    ledger = running(tmp_path / 'l.db')
    out, stop = Watched(), threading.Event()
    console = Console(file=out, width=100, height=40, force_terminal=True, color_system=None)
    show = partial(run_live, tmp_path / 'l.db', stop, console, refresh_s=0.02, clock=lambda: 1031.0)
    with in_background(show, stop):
        assert out.written.wait(LIMIT_S)
        ledger.over('mlp', at=1031, state='cancelled')
        ledger.commit()
    ledger.close()
    assert 'cancelled' in out.getvalue()
    assert out.getvalue().count('\x1b[?25h') == 1  # the cursor is back


def test_stopping_before_there_is_a_ledger_is_fine_and_no_ledger_is_not(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    run_live(tmp_path / 'none.db', stop, Console(file=io.StringIO()))
    (tmp_path / 'text').write_text('not a ledger at all')
    with pytest.raises(BadInput, match='not a FreeTrain ledger'):
        run_live(tmp_path / 'text', stop, Console(file=io.StringIO()))


def test_metrics_are_lines_with_their_course() -> None:
    curves = {
        'accuracy': {'cnn': [(10, None, 1.0, 0.2), (240, None, 2.0, 0.9)]},
        'loss': {f'\x1b{i}': [(5, None, 1.0, 3.0)] for i in range(20)},
    }
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(metric_table(curves))
    title, first, *rest = console.export_text().splitlines()
    assert 'over samples' in title
    assert first.split() == ['accuracy', 'cnn', 22 * '▁' + '█', '0.9', '0.2', '0.9']
    assert len(rest) == 16 and rest[-1].startswith('and 5 more') and '\x1b' not in ''.join(rest)
    assert sparkline([(12, 1.0), (24, 2.0)]) == 12 * ' ' + 11 * '▁' + '█'

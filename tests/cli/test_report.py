"""``freetrain report``: its figures, and how the page looks in a real browser."""

import json
import math
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from playwright.sync_api import Browser

from parsl_freetrain.cli.main import main
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model.events import Action, Rescaled, StartFragment, StopFragment
from parsl_freetrain.core.model.types import ScalingCurve
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.replay.forecast import trainers_at
from parsl_freetrain.report import metrics
from parsl_freetrain.report.figures import Figures, as_document
from parsl_freetrain.report.learned import rescale_costs, scalings
from parsl_freetrain.report.page import report_page
from parsl_freetrain.report.svg import linear, logarithmic, seconds
from tests.support.browser import DESKTOP, PHONE, tab
from tests.support.browser import browser as browser  # a fixture
from tests.support.journals import demo_journal
from tests.support.told import Told

HOSTILE = '<img src=x onerror="document.title=\'broken\'"> & "quoted" \x1b[2J \u202e $style'
CURVE = {'nodes': [1, 2, 4], 'rate': [1.0, 2.0, 4.0]}


def read(path: Path, run: str | None = None, now: float = 2e9) -> Figures:
    return Figures(Journal(path).history(run), now, DpAllocator())


def small_ledger(path: Path, *, fails: bool = True, **more: Any) -> Told:
    """One trainer, 10 samples/s a node: 1 node from 0 to 100 s, told to take 2 at 100 s, preempted
    at 200 s after a checkpoint at 150 s. ``more``: of its spec; ``fails``: in the end.
    """
    ledger = Told(path)
    ledger.begin_run('r', at=1000.0, command='python x.py')
    ledger.offered([('n0', 1000.0, 1300.0), ('n1', 1050.0, 1200.0)])
    spec: dict[str, Any] = {'min_nodes': 1, 'max_nodes': 4, 'curve': CURVE}
    spec |= {'rescale_up_s': 3.0, 'rescale_down_s': 2.0, 'stated_costs': ('up', 'down'), **more}
    ledger.submitted('t', at=1000.0, spec=spec, total_samples=10_000)
    for block, node, at, end in (('b0', 'n0', 1000.0, 1300.0), ('b1', 'n1', 1060.0, 1200.0)):
        ledger.block_opened(block, at=at, names=[node])
        ledger.joined(f'{block}/{node}', at=at + 5, block=block, name=node)
        if end < 1300:
            ledger.left(f'{block}/{node}', at=end, how='taken')
            ledger.block_closed(block, at=end, how='taken')
    decide(ledger, 1005.0, {'t': 0}, {'t': 1})
    ledger.fragment_decided('t', 1, at=1005.0, nodes=('b0/n0',))
    ledger.fragment_started('t', 1, at=1010.0, samples=0)
    for at in range(1020, 1101, 10):
        ledger.fragment_progress(
            't', 1, at=float(at), samples=(at - 1010) * 10, rate=10.0, metrics={'loss': 1000.0 / at}
        )
    decide(ledger, 1100.0, {'t': 1}, {'t': 1})
    decide(ledger, 1100.0, {'t': 1}, {'t': 2}, StopFragment('t', 1, 'rescale from 1 to 2 nodes'))
    ledger.checkpoint('t', 1, at=1102.0, samples=920, seconds=2.0, pause_s=2.0)
    took = {'start_s': 1.0, 'step_s': 0.1, 'checkpoint_s': 0.5}
    ledger.fragment_ended('t', 1, at=1102.0, ending='stopped', samples=920, reached=920, **took)
    started = StartFragment('t', 2, ('b0/n0', 'b0/n1'), None, 920)
    decide(ledger, 1102.0, {'t': 0}, {'t': 2}, started)
    ledger.fragment_decided('t', 2, at=1102.0, nodes=('b0/n0', 'b1/n1'), from_samples=920)
    ledger.fragment_started('t', 2, at=1106.0, samples=920)
    for at in range(1116, 1201, 10):
        done, loss = 920 + (at - 1106) * 20, {'loss': 1000.0 / at}
        ledger.fragment_progress('t', 2, at=float(at), samples=done, rate=20.0, metrics=loss)
    ledger.checkpoint('t', 2, at=1150.0, samples=1800, seconds=1.0, pause_s=1.0)
    ledger.fragment_ended('t', 2, at=1200.0, ending='preempted', samples=1800, reached=2800)
    decide(ledger, 1200.0, {'t': 0}, {'t': 1})
    ledger.fragment_decided('t', 3, at=1200.0, nodes=('b0/n0',), from_samples=1800)
    ledger.fragment_started('t', 3, at=1204.0, samples=1800)
    how = {'ending': 'failed', 'error': 'ValueError: ' + HOSTILE}
    ledger.fragment_ended('t', 3, at=1230.0, samples=1800, reached=2060, **how)
    if fails:
        ledger.over('t', at=1230.0, state='failed', why='it broke')
    return ledger


def decide(
    ledger: Told, at: float, current: dict[str, int], allocation: dict[str, int], *actions: Action
) -> None:
    worth = {'objective': 2.0, 'staying': 1.0, 'seconds': 0.001}
    ledger.decision(at, *actions, current=current, allocation=allocation, **worth)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    ledger = small_ledger(tmp_path / 'ledger.journal')
    ledger.end_run(at=1300.0, how='done')
    ledger.close()
    return tmp_path / 'ledger.journal'


def test_what_became_of_every_node_second(small: Path) -> None:
    became = {(c.kind, c.cause): c.node_s for c in read(small).causes}
    assert became == pytest.approx(
        {
            ('starting', 'block'): 5 + 5,
            ('starting', 'fragment'): 5 + 2 * 4 + 4,
            ('checkpointing', ''): 2 + 2 * 1,
            ('trained', ''): (1100 - 1010) + 2 * (1150 - 1106 - 1),
            ('lost', 'preempted'): 2 * 50,
            ('lost', 'failed'): 26,
            # n1 had joined at 1065 and was not used before 1102; n0 is idle from 1230 on; n1 was
            # offered from 1050 and asked for at 1060.
            ('idle', 'joined'): (1102 - 1065) + 70,
            ('idle', 'outside'): 10,
        }
    )


def test_predictions_are_told_beside_what_came_true(small: Path) -> None:
    first, second, third = read(small).outcomes
    # Nothing was known of its speed before it had run.
    assert first.nodes == 1 and first.expected is None and first.trained == pytest.approx(900)
    # 100 s at 20/s, less 3 s at 10/s; changing nothing: 100 s at 10/s. What the preemption took is
    # not counted.
    assert (second.nodes_before, second.nodes) == (1, 2)
    found = [second.expected, second.staying, second.trained]
    assert found == pytest.approx([1970, 1000, 1800 - 900])
    # Nothing is left of the two nodes that were taken: changing nothing would train nothing, and
    # the change costs nothing.
    assert (third.at, third.until) == (1200.0, 1230.0)
    assert (third.nodes_before, third.nodes, third.trained) == (0, 1, 0.0)
    assert [third.expected, third.staying] == pytest.approx([30 * 10, 0])


def test_a_decision_that_takes_time_to_be_carried_out_is_told_of_once(tmp_path: Path) -> None:
    """Another trainer has to stop first; the pool changes, but not the trainer's share."""
    ledger = small_ledger(tmp_path / 'ledger.journal')
    ledger.submitted('t-2', at=1200.0)
    start = StartFragment('t-2', 1, ('b0/n0',), None, 0)
    for at, more in ((1240.0, ()), (1241.0, ()), (1242.0, (start,))):
        decide(ledger, at, {'t-2': 0}, {'t-2': 1}, *more)
    decide(ledger, 1250.0, {'t-2': 0}, {'t-2': 1})  # what it had was taken
    ledger.end_run(at=1300.0, how='done')
    ledger.close()
    assert [
        (o.at, o.until, o.nodes_before, o.nodes)
        for o in read(tmp_path / 'ledger.journal').outcomes
        if o.trainer == 't-2'
    ] == [(1240.0, 1250.0, 0, 1), (1250.0, 1300.0, 0, 1)]


def test_predictions_cost_what_the_decision_took_a_rescale_to_cost(tmp_path: Path) -> None:
    """Nothing is stated: what is assumed is followed by a start, a checkpoint and a rescale."""
    ledger = small_ledger(tmp_path / 'ledger.journal', fails=False, stated_costs=())
    ledger.fragment_progress('t', 3, at=1210.0, samples=1850, rate=10.0)
    decide(ledger, 1220.0, {'t': 1}, {'t': 2})
    ledger.take(Rescaled(1225.0, 't', 3, 1, 2, 7.0))
    decide(ledger, 1230.0, {'t': 1}, {'t': 2}, StopFragment('t', 3, 'rescale'))
    decide(ledger, 1240.0, {'t': 0}, {'t': 1})
    decide(ledger, 1250.0, {'t': 1}, {'t': 2})
    ledger.end_run(at=1300.0, how='done')
    ledger.close()
    expected = {o.at: o.expected for o in read(tmp_path / 'ledger.journal').outcomes}
    assert expected[1100.0] == pytest.approx(100 * 20 - 3 * 10)
    assert expected[1220.0] == pytest.approx(10 * 20 - 1.5 * 10)
    assert expected[1250.0] == pytest.approx(50 * 20 - 7 * 10)


def test_why_knows_speeds_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_class = (('fast', ScalingCurve((1, 2), (1.0, 2.0))),)
    small_ledger(tmp_path / 'ledger.journal', curve=None, class_curves=by_class).close()
    assert main(['why', 't', '--ledger', str(tmp_path)]) == 0
    assert 'Its scaling curve was stated' in capsys.readouterr().out


def test_speeds_of_classes_are_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = small_ledger(tmp_path / 'ledger.journal', fails=False, curve=None)
    for block, node_class in (('b0', 'fast'), ('b1', 'fast'), ('b2', 'slow'), ('b3', 'cpu')):
        ledger.block_opened(block, at=1000.0, nodes=1, node_class=node_class)
    ledger.joined('b2/s', at=1240.0, block='b2', name='s')
    start = StartFragment('t', 4, ('b2/s',), None, 1800)
    decide(ledger, 1235.0, {'t': 0}, {'t': 0}, start)
    for fragment, at in ((4, 1240.0), (5, 1270.0)):
        decide(ledger, at, {'t': 0}, {'t': 1}, start)
        ledger.fragment_decided('t', fragment, at=at, nodes=('b2/s',), from_samples=1800)
        ledger.fragment_started('t', fragment, at=at, samples=1800)
        ledger.fragment_progress('t', fragment, at=at + 20, samples=1860, rate=3.0)
    ledger.end_run(at=1300.0, how='done')
    ledger.close()
    assert main(['why', 't', '--ledger', str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert 'is known: 10 on 1, 20 on 2 nodes of class fast.' in out
    assert 'is known: 3 on 1 node of class slow.' in out
    assert 'It has not been measured on nodes of class cpu' in out
    found = read(tmp_path / 'ledger.journal')
    assert [(s.node_class, s.measured) for s in found.scalings['t']] == [
        ('fast', ((1, 10.0, 1), (2, 20.0, 1))),
        ('slow', ((1, 3.0, 2),)),
    ]
    # Nothing was known of the slow node at the first decision for it.
    expected = {o.at: o.expected for o in found.outcomes}
    assert expected[1240.0] is None and expected[1270.0] == pytest.approx(30 * 3)
    [trainer] = trainers_at(tmp_path / 'ledger.journal')
    assert {name: curve.rate_at(1) for name, curve in trainer.trainer.class_curves} == {
        'fast': pytest.approx(10, rel=0.05),
        'slow': pytest.approx(3, rel=0.05),
    }


def test_why_says_what_decision_has_gained(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['why', 't', '--last', '9', '--ledger', str(small)]) == 0
    out = capsys.readouterr().out
    # Of two decisions at one instant it is told of the one that changes something.
    assert out.count('1,970 samples') == 1 and 'keeps 1 node' not in out
    [on_its_way] = [part for part in out.split('\n\n') if "'t' goes from 0 to 2 nodes" in part]
    assert 'Expected: ' in on_its_way and 'without a change' not in on_its_way
    for said in (
        "30 s. Expected: 300 samples; without a change: 0 samples; 't' trained 0 samples",
        "100 s. Expected: 1,970 samples; without a change: 1,000 samples; 't' trained 900 samples",
        "95 s. What to expect was not known yet; 't' trained 900 samples that it kept.",
    ):
        assert f'It was in force for {said}' in out


def test_costs_of_changes_and_the_curve(small: Path) -> None:
    found = read(small)
    assert {c.change: (c.assumed_s, c.measured_s) for c in found.rescales} == {
        'up': (3.0, (6.0,)),
        'start': (0.0, (5.0, 4.0)),
    }
    history = Journal(small).history()
    history.runs[0].trainers['t'].rescaled.append(Rescaled(1106.0, 't', 2, 1, 2, 5.5))
    costs = {c.change: c.measured_s for c in rescale_costs(history)}
    assert costs['up'] == (5.5,)  # who was there knows better
    [scaling] = found.scalings['t']
    assert scaling.stated and scaling.measured == ((1, 10.0, 1), (2, 20.0, 1))
    # The stated curve has no unit of its own: its size is what was measured on the fewest nodes.
    assert scaling.curve == ((1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0))


def test_losses_are_thinned_with_their_extremes_and_without_what_is_no_number(
    tmp_path: Path,
) -> None:
    path = tmp_path / 'ledger.journal'
    ledger = Told(path)
    ledger.begin_run('r', at=0.0)
    ledger.submitted('t', at=0.0)
    ledger.fragment_decided('t', 1, at=0.0, nodes=('n',))
    for i in range(5000):
        odd = {7: math.nan, 8: math.inf, 9: 1e308, 10: -1e308, 1234: 99.0, 4321: -5.0}
        loss = odd.get(i, 1.0 + math.sin(i))
        ledger.fragment_progress('t', 1, at=float(i), samples=i, rate=None, metrics={'loss': loss})
    ledger.close()
    [line] = read(path).losses['t'].fragments
    assert len(line) <= metrics.MOST_POINTS + 2 and (line[0].samples, line[-1].samples) == (0, 4999)
    assert {(p.samples, p.value) for p in line} >= {(1234, 99.0), (4321, -5.0)}
    assert all(abs(p.value) < 100 for p in line)
    assert 'nan' not in report_page(read(path))
    assert main(['status', '--ledger', str(path)]) == 0


def test_axes_have_few_round_names() -> None:
    for axis, names in (
        (linear(0, 9), ['0', '2', '4', '6', '8']),
        (linear(0, 1, whole=True), ['0', '1']),
        (linear(3, 3), ['3', '4', '5', '6']),
        (seconds(100), ['0 s', '30 s', '1:00', '1:30']),
        (seconds(0), ['0 s', '0.2 s', '0.4 s', '0.6 s', '0.8 s', '1 s']),
        (
            seconds(20 * 86400),
            ['0 s', '4 d 0:00:00', '8 d 0:00:00', '12 d 0:00:00', '16 d 0:00:00', '20 d 0:00:00'],
        ),
        (logarithmic(20, 300), ['20', '50', '100', '200']),
        (logarithmic(1, 1e9), ['1', '100', '10k', '1M', '100M']),
        (logarithmic(3, 3), ['2', '5']),
    ):
        assert [name for _, name in axis.ticks] == names
        parts = [axis.part(value) for value, _ in axis.ticks]
        assert parts == sorted(parts) and axis.part(axis.low) == 0 and axis.part(axis.high) == 1


@pytest.fixture(scope='module')
def long_report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of two runs with 10 trainers on 14 nodes, and its figures."""
    folder = tmp_path_factory.mktemp('report')
    names = [*(f'trainer {i}' for i in range(9)), 'cnn-' + 30 * 'long']
    demo_journal(folder / 'ledger.journal', runs=2, seconds=60.0, trainers=names, nodes=14)
    found = read(folder / 'ledger.journal')
    (folder / 'out.html').write_text(report_page(found))
    return folder / 'out.html', as_document(found)


@pytest.mark.parametrize(('size', 'dark'), [(DESKTOP, False), (PHONE, True)])
def test_the_page_in_a_browser(
    browser: Browser, size: tuple[int, int], dark: bool, long_report: tuple[Path, dict[str, Any]]
) -> None:
    out, told = long_report
    with tab(browser, out.as_uri(), size, dark=dark) as seen:
        assert seen.complaints == [] and seen.overflowing() == []
        assert seen.asked_for - {'data:,'} == {out.as_uri()}
        share = 100 * told['summary']['node_s']['trained'] / told['summary']['node_s']['offered']
        text = seen.text()
        for words in (f'{share:.1f} %', 'Predicted and actual', '2 runs, one continuing the other'):
            assert words in text
        for name, t in told['summary']['trainers'].items():
            assert f'{t["samples"]:,} of {t["samples_expected"]:,}' in text and name[:50] in text
        # Every picture has its size, and something in it with a colour that is not the paper's.
        drawn = seen.page.evaluate("""[...document.querySelectorAll('svg.plot')].map(svg => {
            const parts = [...svg.querySelectorAll('.area, .line, .dot')];
            const paper = getComputedStyle(document.body).backgroundColor;
            const box = svg.getBoundingClientRect();
            const coloured = parts.every(e => {
                const style = getComputedStyle(e);
                return [style.fill, style.stroke].some(c => c !== 'none' && c !== paper);
            });
            return [box.width, box.height, parts.length, coloured];
        })""")
        assert len(drawn) >= 3 + 10
        assert all(
            width > 200 and height > 30 and parts and coloured
            for width, height, parts, coloured in drawn
        ), drawn
        paper = seen.page.evaluate('getComputedStyle(document.body).backgroundColor')
        assert (sum(map(int, re.findall(r'\d+', paper))) < 200) == dark


@pytest.mark.parametrize('axis', ['samples', 'epochs', 'seconds'])
def test_metrics_of_all_trainers_in_one_picture(tmp_path: Path, axis: str) -> None:
    history = Journal(demo_journal(tmp_path / 'l', runs=2, seconds=60.0)).history()
    for one in history.trainings:
        one.submitted = structs.replace(one.submitted, total_epochs=6)
    text = report_page(Figures(history, 2e9, None), metrics.MetricView(axis, 0.8))
    _, _, chart = text.partition(f'aria-label="loss over {axis}"')
    lines = re.findall(r'<polyline class="line (.*?)"', chart.partition('</section>')[0])
    assert len(lines) == 4 and sum('raw' in kind for kind in lines) == 2  # of cnn and mlp
    assert 'moving averages (weight 0.8)' in text


def test_a_stated_curve_meets_the_speed_on_the_smallest_number_of_nodes() -> None:
    """The last report of a fragment is often another than its typical one."""
    told = Told()
    told.begin_run('r', at=0.0)
    told.submitted('t', at=0.0, spec={'max_nodes': 4, 'curve': CURVE})
    for number in (1, 2):
        told.fragment_decided('t', number, at=0.0, nodes=('x',))
        for rate in (10.0, 10.0, 10.0, 4.0):
            told.fragment_progress('t', number, at=0.0, samples=0, rate=rate)
    (found,) = scalings(told.history)['t']
    assert (found.measured, found.curve[0]) == (((1, 10.0, 2),), (1, 10.0))


def test_the_page_says_each_thing_once_and_plainly(small: Path) -> None:
    found = read(small)
    found.metrics = {'accuracy': {'t': (metrics.CurvePoint(920, None, 100.0, 0.97),)}}
    page = report_page(found)
    assert '>accuracy</td>' in page and '>0.97</td>' in page  # and no chart with one dot
    assert 'accuracy over samples' not in page
    uses = page[page.index('Node-hours offered') : page.index('Nodes over time')]
    first = re.findall(r'<tr><td class="text">([^<]+)</td>', uses)
    assert {'block starting', 'fragment starting', 'idle in a block'} <= set(first)
    assert len(first) == len(set(first))
    loss = page[page.index('loss of t over samples') :]
    assert loss.index('upright preempted') < loss.index('<polyline')  # which it must not cover
    assert '<h1>FreeTrain report</h1>' in page and 'Of run r.' in page
    assert f'<b>{found.efficiency.of_run:.2f}</b><span>efficiency U</span>' in page


def test_curves_are_those_of_the_kept_training(tmp_path: Path) -> None:
    found = read(demo_journal(tmp_path / 'l.db', runs=2, seconds=60.0))
    for trainer, curve in found.metrics['loss'].items():
        samples = [point.samples for point in curve]
        assert samples == sorted(set(samples)) and len(samples) > 5
        assert any(f.ending == 'preempted' for f in found.history.fragments if f.trainer == trainer)
    assert as_document(found)['metrics']['loss'].keys() == {'cnn', 'mlp'}
    # The first values count no more than others.
    assert metrics.smoothed([(0, 4.0), (1, 2.0)], 0.5) == [(0, 4.0), (1, pytest.approx(8 / 3))]
    assert [p.value for p in metrics.thinned(curve, 10)][-1] == curve[-1].value


def test_names_and_errors_are_text_in_the_page(tmp_path: Path, browser: Browser) -> None:
    path = tmp_path / 'ledger.journal'
    ledger = small_ledger(path)
    ledger.submitted(HOSTILE, at=1000.0)
    why = '</style><script>document.title="broken"</script>'
    ledger.over(HOSTILE, at=1200.0, state='failed', why=why)
    ledger.end_run(at=1300.0, how=HOSTILE)
    ledger.close()
    out = tmp_path / 'out.html'
    assert main(['report', '--ledger', str(path), '--out', str(out)]) == 0
    with tab(browser, out.as_uri()) as seen:
        name = HOSTILE.translate(dict.fromkeys((0x1B, 0x202E), '?'))
        assert seen.page.title() == f't, {name} – FreeTrain'
        assert seen.complaints == [] and seen.page.locator('img, script').count() == 0
        text = seen.text()
    assert '<img src=x onerror' in text and 'ValueError: <img' in text and '$style' in text
    assert not {'\x1b', '\u202e'} & set(out.read_text())


def test_the_page_may_run_and_load_nothing(small: Path, browser: Browser, tmp_path: Path) -> None:
    """Even if something got in unescaped, the page's own policy stops it."""
    out = tmp_path / 'out.html'
    page_text = report_page(read(small))
    assert '</h1>' in page_text
    bad = '<script>document.title="broken"</script><img src="http://127.0.0.1:9/x">'
    out.write_text(page_text.replace('</h1>', f'</h1>{bad}', 1))
    with tab(browser, out.as_uri()) as seen:
        assert seen.page.title() == 't – FreeTrain'
        assert any('Content Security Policy' in said for said in seen.complaints)


def test_the_file_is_private_whole_and_where_it_was_asked_for(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(['report', '--run', 'r', '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    assert told['report'] == str(tmp_path / 'freetrain-report.html') and told['runs'] == ['r']
    assert [o['at'] for o in told['outcomes']] == [5.0, 100.0, 200.0]
    assert main(['report']) == 0
    assert 'open it in a browser' in capsys.readouterr().out
    assert stat.S_IMODE((tmp_path / 'freetrain-report.html').stat().st_mode) == 0o600
    assert {p.name for p in tmp_path.iterdir()} == {'ledger.journal', 'freetrain-report.html'}
    unwritten = 'The report absent/x.html cannot be written'
    bad = (['--out', 'absent/x.html'], unwritten), (['--run', 'x'], "no run 'x'")
    for arguments, words in (*bad, (['--out', '.'], 'cannot be written')):
        assert main(['report', *arguments]) == 2
        out = capsys.readouterr()
        assert out.out == '' and len(out.err.splitlines()) == 1 and words in out.err
    assert {p.name for p in tmp_path.iterdir()} == {'ledger.journal', 'freetrain-report.html'}


def test_runs_in_which_little_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Told(tmp_path / 'ledger.journal')
    assert main(['report', '--ledger', str(tmp_path), '--out', str(tmp_path / 'a.html')]) == 2
    assert 'has no run yet' in capsys.readouterr().err
    ledger.begin_run('r', at=5.0)
    ledger.commit()
    for more in (False, True):
        if more:
            ledger.submitted('t', at=5.0)
            ledger.commit()
        assert main(['report', '--ledger', str(tmp_path), '--out', str(tmp_path / 'a.html')]) == 0
        assert 'No node was offered' in (tmp_path / 'a.html').read_text()
    ledger.close()


def test_the_documentation_names_every_figure(small: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / 'docs' / 'report.md').read_text()
    named = set(re.findall(r'`(\w+)`', text))
    assert set(as_document(read(small))) | {'report'} <= named
    for title in re.findall(r'^\| ([A-Z][^|]+) \|', text, re.MULTILINE):
        assert f'>{title}' in report_page(read(small)), title

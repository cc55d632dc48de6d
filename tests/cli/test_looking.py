"""The verbs that look at a run, on one that trains, and on runs that are over or have died."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain import BadInput, Checkpoints, LocalSite, TrainingFuture, freetrain_app
from parsl_freetrain.cli.live.view import LiveView
from parsl_freetrain.cli.main import main
from parsl_freetrain.executor.requests import Cancel
from parsl_freetrain.report.runs import life_of
from parsl_freetrain.report.status import RunStatus
from tests.support.journals import demo_journal
from tests.support.programs import FREETRAIN, Program, run_to_end
from tests.support.told import Told
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

CONTROL = re.compile(r'[\x00-\x09\x0b-\x1f\x7f\u202e]')


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a verb prints as JSON."""
    assert main([*arguments, '--json']) == 0
    return json.loads(capsys.readouterr().out)


def trains(future: TrainingFuture) -> bool:
    return future.progress().samples > 96


def talk(ctx: Any, pause_s: float) -> None:
    print('\x1b[31mI am rank\x1b[0m', ctx.rank, flush=True)
    fit(ctx, pause_s)


def test_looking_at_a_run_and_cancelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = Checkpoints(every_s=1000.0)
    trainer = freetrain_app(max_nodes=1, total_epochs=100_000, checkpoints=keep)(talk)
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), stop_grace_s=1.0) as executor:
        ledger = ['--ledger', str(tmp_path)]
        first = trainer(0.02, trainer_name='first')
        wait_until(lambda: trains(first))
        second = trainer(0.02, trainer_name='second')

        def reasons() -> Any:
            # Of decisions that change nothing and follow each other soon, it has no problem.
            if len(said(capsys, 'status', *ledger)['trainers']) == 1:
                return None  # the journal has not got the second one yet
            found = said(capsys, 'why', 'second', *ledger)
            return found['decisions'] and found['decisions'][0]['alternative'] and found

        wait_until(reasons)

        seen = said(capsys, 'status', *ledger)
        assert (seen['state'], seen['note'], seen['ended']) == ('running', '', None)
        by_name = {t['name']: t for t in seen['trainers']}
        assert by_name['first']['nodes'] == 1 and by_name['second']['nodes'] == 0
        assert by_name['first']['samples'] > 96 and by_name['first']['total'] == 9_600_000
        assert by_name['first']['finish_s'] > 0 and by_name['second']['finish_s'] is None
        assert [(b['joined'], b['trainers']) for b in seen['blocks']] == [(1, ['first'])]

        running = said(capsys, 'why', 'first', *ledger)
        waiting = wait_until(reasons)
        assert (running['state'], running['fragment'], running['waits_for']) == ('running', 1, None)
        why = "It waits because others do more with the pool's 1 node: 'first' 1."
        assert waiting['waits_for'] == why
        # A newer decision that changed nothing has come without its problem, perhaps.
        newest = next(one for one in waiting['decisions'] if one['alternative'] is not None)
        assert (newest['nodes'], newest['nodes_after'], newest['others']) == (1, 0, {'first': 1})
        assert newest['alternative']['nodes'] == 1
        assert newest['alternative']['worse_by'] >= 0

        def in_words() -> str:
            assert main(['why', 'second', *ledger]) == 0
            found = capsys.readouterr().out
            good = 'best choice is 1 node;' in found or '1 node for it would be as good' in found
            return found if good else ''

        words = wait_until(in_words)
        assert "there is 1 node to give away. 'second' keeps 0 nodes; 'first' 1." in words

        assert main(['logs', 'first', *ledger]) == 0
        assert 'I am rank 0\n' in capsys.readouterr().out
        of_rank = '--fragment', '1', '--rank', '0', '--tail', '1'
        [one] = said(capsys, 'logs', 'first', *ledger, *of_rank)
        assert (one['fragment'], one['rank'], len(one['text'].splitlines())) == (1, 0, 1)
        assert main(['logs', 'second', *ledger]) == 2
        assert "'second' has no logs" in capsys.readouterr().err
        assert main(['logs', 'first', *ledger, '--fragment', '7']) == 2
        assert 'no log of a fragment 7; there are those of 1 only' in capsys.readouterr().err

        watched = Program([*FREETRAIN, 'watch', '--json', '--every', '0.2', *ledger])
        assert json.loads(watched.said())['state'] == 'running'

        assert main(['cancel', 'frist', *ledger]) == 2
        assert "no trainer 'frist' in this run; it has 'first', 'second'" in capsys.readouterr().err
        [answer] = said(capsys, 'cancel', 'first', *ledger)
        assert answer['trainer'] == 'first'
        assert str(tmp_path / 'checkpoints' / 'first') in answer['answer']
        wait_until(first.done)
        assert first.cancelled() and first.checkpoint is not None and first.checkpoint.samples > 96
        wait_until(lambda: trains(second))
        assert main(['cancel', 'first', *ledger]) == 2
        assert "Trainer 'first' is cancelled already" in capsys.readouterr().err
        assert [a['trainer'] for a in said(capsys, 'cancel', '--all', *ledger)] == ['second']
        wait_until(second.done)
    assert executor.ledger_path.is_file()

    rest = watched.communicate(timeout=LIMIT_S)[0]
    assert json.loads(rest.splitlines()[-1])['state'] == 'ended'
    assert watched.returncode == 0
    after = said(capsys, 'status', *ledger)
    assert (after['state'], after['blocks']) == ('ended', [])
    assert {t['state'] for t in after['trainers']} == {'cancelled'}
    assert said(capsys, 'why', 'second', *ledger)['waits_for'] is None
    told = said(capsys, 'report', *ledger, '--out', str(tmp_path / 'report.html'))
    assert (tmp_path / 'report.html').stat().st_size > 10_000
    assert {c['kind'] for c in told['node_s'] if c['node_s'] > 0} >= {'trained', 'starting'}
    assert [o['nodes'] for o in told['outcomes'] if o['trainer'] == 'second'][-1] == 1
    assert all(s['measured'] and s['curve'] for s in told['scaling'])
    assert main(['cancel', '--all', *ledger]) == 2
    assert 'has ended (shutdown), so there is nothing to cancel' in capsys.readouterr().err
    assert main(['logs', 'second', '--follow', *ledger]) == 0  # it is over: shows all, and ends
    assert '[0] I am rank 0' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('samples', 'said'),
    [
        ({'cnn': 40, 'mlp': 8}, 'it goes on from the checkpoints.'),
        ({'cnn': 40, 'mlp': 0}, "it goes on from the checkpoints; of 'mlp' there is none yet."),
        ({'cnn': 0, 'mlp': 0}, 'there is no checkpoint yet, so it begins anew.'),
    ],
)
def test_how_to_resume_a_run_says_from_what(samples: dict[str, int], said: str) -> None:
    told = Told()
    told.begin_run('r', at=0.0, command='python mine.py')
    for name, kept in samples.items():
        told.submitted(name, at=0.0, total_samples=100, samples=kept)
    life = life_of(told.history, told.history.runs[0], 9.0, lambda _: False)
    assert life.sentence.endswith(f'To resume, run python mine.py again; {said}')


DIES = """
import os, platform, sys, time
from pathlib import Path
import psutil
from tests.support.told import Told
told = Told(Path(sys.argv[1]))
told.begin_run(
    'r0', at=time.time(), command='python mine.py', host=platform.node(), pid=os.getpid(),
    started=psutil.Process().create_time(), folder=os.getcwd())
told.submitted('cnn', at=time.time(), spec={'min_nodes': 2}, total_samples=100, samples=40)
told.commit()
print('begun', flush=True)
time.sleep(1000)
"""


def test_a_run_that_died_says_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / 'ledger.journal'
    with Program([sys.executable, '-c', DIES, path], cwd=tmp_path) as process:
        process.said()
        assert said(capsys, 'status', '--ledger', str(path))['state'] == 'running'
        why = said(capsys, 'why', 'cnn', '--ledger', str(path))
        assert why['waits_for'].startswith('It waits for a hole')
        process.send_signal(signal.SIGKILL)
    seen = said(capsys, 'status', '--ledger', str(path))
    assert (seen['state'], seen['trainers'][0]['state']) == ('died', 'interrupted')
    how = f'To resume, run python mine.py in {tmp_path} again; it goes on from the checkpoints.'
    assert how in seen['note']
    assert main(['status', '--ledger', str(path)]) == 0
    assert 'died' in capsys.readouterr().out
    assert main(['watch', '--ledger', str(path)]) == 0  # does not wait for what will not come
    assert 'This run died' in capsys.readouterr().out
    for verb in ('cancel', 'preempt'):
        assert main([verb, 'cnn', '--ledger', str(path)]) == 2
        assert 'This run died' in capsys.readouterr().err
    assert main(['report', '--ledger', str(path), '--out', str(tmp_path / 'r.html')]) == 0
    page = (tmp_path / 'r.html').read_text()
    assert 'died' in page and 'goes on' not in page and 'interrupted' in page


def test_all_are_cancelled_though_one_ends_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'ledger.journal'
    ledger = Told(path)
    ledger.begin_run('r0', at=time.time())
    for name in ('first', 'second'):
        ledger.submitted(name, at=1.0, total_samples=9)
    ledger.commit()

    def ask(path: Path, asked: Cancel, *_: object) -> str:
        ledger.over('first', at=time.time(), state='finished')
        ledger.commit()
        if asked.trainer == 'first':
            raise BadInput("Trainer 'first' is finished already.")
        return f'Trainer {asked.trainer!r} is being cancelled.'

    monkeypatch.setattr('parsl_freetrain.cli.cancel.ask', ask)
    assert main(['cancel', '--all', '--ledger', str(path)]) == 0
    said = capsys.readouterr().out
    assert "Trainer 'first' is over meanwhile (finished)." in said and "'second' is being" in said
    ledger.close()


@pytest.mark.parametrize('form', ['json', 'lines', 'terminal'])
def test_watch_shows_the_end_of_a_run_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Also if the run ends between two looks at it."""
    shown: list[str] = []
    with closing(Told(tmp_path / 'ledger.journal')) as ledger:
        ledger.begin_run('run-1', at=time.time())
        ledger.submitted('cnn', at=time.time(), spec={'min_nodes': 1}, total_samples=10)
        ledger.commit()
        look = LiveView.snapshot

        def then_it_ends(view: LiveView, now: float) -> RunStatus:
            seen = look(view, now)
            shown.append(seen.life.state)
            ledger.over('cnn', at=time.time(), state='failed', why='it broke')
            ledger.end_run(at=time.time(), how='done')
            return seen

        monkeypatch.setattr(LiveView, 'snapshot', then_it_ends)
        if form == 'terminal':
            monkeypatch.setenv('FORCE_COLOR', '1')
        options = ['--json'] if form == 'json' else []
        assert main(['watch', '--every', '0.01', '--ledger', str(tmp_path), *options]) == 0
    out = capsys.readouterr().out
    assert shown == ['running', 'ended']
    assert 'failed' in (out.splitlines()[-1] if form != 'terminal' else out)


def test_watch_waits_for_a_run_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First there is no ledger, then one without a run."""
    path = tmp_path / 'ledger.journal'
    with Program([*FREETRAIN, 'watch', '--ledger', path], stderr=subprocess.PIPE) as watching:
        assert 'Waiting for a run to begin' in watching.stderr.readline()
        Told(path).close()
        assert 'has no run yet. Waiting for a run' in watching.stderr.readline()
        other = demo_journal(tmp_path / 'other.sqlite', seconds=40.0)
        other.rename(path)
        out, _ = watching.communicate(timeout=LIMIT_S)
    assert watching.returncode == 0 and 'mlp' in out


def test_an_empty_ledger_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'ledger.journal').touch()
    assert main(['status', '--ledger', str(tmp_path)]) == 2
    assert 'ledger.journal is empty: no run has written to it yet.' in capsys.readouterr().err


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A terminal without all characters, and a full disk."""
    demo_journal(tmp_path / 'ledger.journal', seconds=40.0)
    command, latin_1 = [*FREETRAIN, 'status'], {'PYTHONIOENCODING': 'latin-1'}
    latin = run_to_end(command, cwd=tmp_path, more_env=latin_1, encoding='latin-1')
    assert (latin.returncode, latin.stderr) == (0, '') and 'mlp' in latin.stdout
    with open('/dev/full', 'w') as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    said = 'freetrain: the output cannot be written: No space left on device\n'
    assert done.stderr == said


def test_a_run_elsewhere_long_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Told(tmp_path / 'ledger.journal')
    about = {'host': 'elsewhere', 'pid': 1, 'folder': '/home/x'}
    ledger.begin_run('r0', at=time.time() - 1000, command='python mine.py', **about)
    ledger.alive(time.time() - 500)
    ledger.commit()
    seen = said(capsys, 'status', '--ledger', str(tmp_path))
    assert seen['state'] == 'silent'
    assert re.search(r'noted nothing for 50\d s: its process 1 on elsewhere may', seen['note'])
    ledger.alive(time.time())
    ledger.commit()
    assert said(capsys, 'status', '--ledger', str(tmp_path))['state'] == 'running'
    ledger.begin_run('r1', at=time.time())
    ledger.close()
    assert said(capsys, 'status', '--ledger', str(tmp_path), '--run', 'r0')['state'] == 'died'


@pytest.mark.parametrize('columns', [40, 200])
def test_into_a_pipe_there_are_no_control_characters(
    tmp_path: Path,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo_journal(tmp_path / 'ledger.journal', seconds=40.0)
    journal = Told(tmp_path / 'ledger.journal')
    journal.begin_run('run-2', at=1_790_000_500.0)
    for name in ('cnn', 'mlp'):
        journal.submitted(name, at=1_790_000_500.0, total_samples=10)
    journal.over('mlp', at=1_790_000_501.0, state='failed', why='it \x1b[2J \u202e broke')
    journal.end_run(at=1_790_000_502.0, how='done')
    monkeypatch.setenv('COLUMNS', str(columns))
    for verb in (['status'], ['watch'], ['why', 'mlp']):
        assert main([*verb, '--ledger', str(tmp_path)]) == 0
        out = capsys.readouterr()
        assert 'broke' in out.out and not CONTROL.search(out.out) and out.err == ''
        if verb == ['status']:
            assert all(len(line) <= columns for line in out.out.splitlines())


def test_a_pipe_that_closes_is_no_error(tmp_path: Path) -> None:
    demo_journal(tmp_path / 'ledger.journal', seconds=40.0, ended=False)
    command = [*FREETRAIN, 'watch', '--json', '--every', '0.01']
    with Program(command, cwd=tmp_path, stderr=subprocess.PIPE) as watching:
        watching.stdout.readline()
        watching.stdout.close()
        assert (watching.wait(LIMIT_S), watching.stderr.read()) == (0, '')


def test_bad_input_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = demo_journal(tmp_path / 'ledger.journal', seconds=20.0)
    newer = tmp_path / 'newer.journal'
    newer.write_bytes(b'FreeTrain journal 99\n')
    for arguments, words in (
        (['status', '--ledger', 'absent'], 'no run with the ledger absent'),
        (['status', '--ledger', str(newer)], 'version 99'),
        (['status', '--run', 'rum-0'], "no run 'rum-0' in this ledger; it has 'run-0'"),
        (['watch', '--every', '-1'], '--every is -1'),
        (['why', 'cmn'], "no trainer 'cmn' in this run; it has 'cnn', 'mlp'"),
        (['why', 'cnn', '--last', '-1'], '--last is -1'),
        (['logs', 'cnn', '--follow', '--json'], '--follow and --json exclude each other'),
        (['logs', 'cnn', '--tail', '-2'], '--tail'),
        (['report', '--axis', 'steps'], 'one of samples, epochs, seconds'),
        (['report', '--smooth', '1'], 'below 1'),
        (['cancel'], 'Name one trainer, or give --all'),
        (['cancel', 'cnn'], 'has ended (done)'),
        (['preempt', 'cnn'], 'has ended (done)'),
        (['preempt', 'cnn', '--grace', '-1'], '--grace is -1'),
    ):
        assert main(arguments) == 2, arguments
        out = capsys.readouterr()
        assert out.out == '' and len(out.err.splitlines()) == 1 and words in out.err, out
    assert path.is_file()


def test_a_ledger_without_a_run_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Told(tmp_path / 'ledger.journal').close()
    assert said(capsys, 'status', '--ledger', str(tmp_path))['trainers'] == []
    assert main(['why', 'cnn', '--ledger', str(tmp_path)]) == 2
    assert 'has no run yet' in capsys.readouterr().err


def test_following_shows_what_is_added(tmp_path: Path) -> None:
    from parsl_freetrain.cli.logs import Tail, logs_in, readable

    path = tmp_path / 'fragment-000002-rank-0.log'
    tail = Tail(path)
    assert tail.new() == []
    path.write_bytes(b'one\n10%\r20%\r30%\r\nhalf')
    assert tail.new() == ['one', '30%']
    with path.open('ab') as file:
        file.write(b' a line\n\xff\n')
    assert tail.new() == ['half a line', '�']
    assert tail.new(all_of_it=True) == []
    assert Tail(path).new(True, 2) == ['half a line', '�'] and Tail(path).new(True, 0) == []
    (tmp_path / 'fragment-000001-rank-1.log').touch()
    (tmp_path / 'other').touch()
    assert [(f.fragment, f.rank) for f in logs_in(tmp_path)] == [(1, 1), (2, 0)] and logs_in(
        tmp_path / 'no'
    ) == []
    assert readable('\x1b[1;31mred\x1b[0m \x1b]0;title\x07\tx\x08') == 'red     x?'

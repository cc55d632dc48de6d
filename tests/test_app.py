"""``@freetrain_app``: bad input gets a sentence at once; functions reach the nodes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import parsl
import pytest
from parsl.app.app import join_app, python_app
from parsl.config import Config
from parsl.dataflow.errors import JoinError
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.providers import LocalProvider

import parsl_freetrain as ft
from parsl_freetrain.executor.run_lock import RunLock
from parsl_freetrain.executor.settings import check_trainer
from parsl_freetrain.sites.idle_schedule import IdleInterval, Schedule
from parsl_freetrain.training.checkpoint.folder_claim import claim
from tests.support.programs import run_to_end
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until


def untyped(group: Any) -> Any:
    """To give it what type checkers refuse."""
    return group


def app(**settings: Any) -> ft.FreeTrainApp:
    return ft.freetrain_app(**{'total_epochs': 1, **settings})(fit)


def named(name: str) -> ft.FreeTrainApp:
    """An app whose function has this name."""

    def function(ctx: Any) -> None:
        fit(ctx)

    function.__name__ = name
    return ft.freetrain_app(total_epochs=1)(function)


MIXED = ft.Scaling(class_rates={'fast': {1: 2.0}, 'slow': {1: 1.0}}, mixed=True)


def test_settings_that_can_never_work() -> None:
    for settings, said in (
        ({'min_nodes': 3, 'max_nodes': 2}, 'min_nodes is 3 and max_nodes 2'),
        ({'min_nodes': 0}, 'min_nodes is 0; it must be at least 1'),
        ({'total_epochs': 0}, 'total_epochs is 0; it must be a number above 0'),
        ({'total_epochs': float('nan')}, 'total_epochs is nan'),
        ({'total_epochs': None, 'total_samples': 0}, 'total_samples is 0; it must be at least 1'),
        ({'total_samples': 10}, '2 of total_epochs, total_samples and goal are given'),
        ({'total_epochs': None}, '0 of total_epochs, total_samples and goal are given'),
        ({'total_epochs': '5'}, "total_epochs is '5'; it must be a number above 0"),
        ({'mode': 'throughput'}, "mode is 'throughput'; it must be a Reproducible or a Throughput"),
        ({'max_node': 1}, "no argument 'max_node'; say max_nodes"),
        ({'shards': 4}, "no argument 'shards'; say mode=Reproducible(shards=...)"),
        ({'checkpoint_every_s': 4}, "no argument 'checkpoint_every_s'; say checkpoints"),
        (
            {'mode': lambda: untyped(ft.Reproducible)(on_nan='ignore')},
            "on_nan is 'ignore'; it must be 'stop' or 'skip' or 'rollback'",
        ),
        ({'max_nodes': 4, 'mode': ft.Reproducible(shards=3)}, 'shards must be at least 4'),
        (
            {'max_nodes': 2, 'ranks': ft.Ranks(per_node=2), 'mode': ft.Reproducible(shards=3)},
            'shards must be at least 4',
        ),
        ({'mode': lambda: ft.Reproducible(shards=0)}, 'shards is 0; it must be at least 1'),
        ({'ranks': lambda: ft.Ranks(per_node=0)}, 'per_node is 0'),
        ({'checkpoints': lambda: ft.Checkpoints(every_s=0.0)}, 'every_s is 0.0'),
        (
            {'checkpoints': lambda: untyped(ft.Checkpoints)(resume='maybe')},
            "resume is 'maybe'; it must be 'auto' or 'require'",
        ),
        ({'scaling': lambda: ft.Scaling(rescale_up_s=-1.0)}, 'rescale_up_s is -1.0'),
        ({'scaling': lambda: ft.Scaling(rate={1: -1.0})}, 'rate of a scaling curve'),
        ({'scaling': lambda: ft.Scaling(mixed=True)}, 'needs class_rates'),
        ({'scaling': MIXED, 'mode': ft.Throughput()}, 'needs mode=Reproducible'),
        ({'scaling': MIXED, 'ranks': ft.Ranks(ahead=True)}, 'do not go together'),
        ({'scaling': ft.Scaling(rate={1: 0.0})}, 'rate 0 at every count'),
        (
            {'scaling': lambda: ft.Scaling(efficiency={1: 2.0})},
            'Statistical efficiency: value[0] is 2.0; it must be a number from 0 to 1',
        ),
        ({'owner': lambda: ft.Owner(priority=0.0)}, 'priority is 0.0; it must be a number above 0'),
        (
            {'sizes': [2, 4], 'max_nodes': 1, 'min_nodes': 1},
            'none of its sizes [2, 4] is from min_nodes to max_nodes, 1 to 1',
        ),
        ({'sizes': []}, 'sizes is []; it must have node counts'),
        ({'sizes': {0: ft.Shape()}}, 'sizes is {0: '),
        (
            {'sizes': {2: 'shard=2'}},
            "sizes[2] is 'shard=2'; it must be 'auto' or a Shape or a list (each a Shape).",
        ),
        ({'sizes': {2: ()}}, '2 nodes have an empty list of shapes'),
        ({'sizes': {2: (ft.Shape(data=2), ft.Shape(data=2))}}, '2 nodes have the same shape twice'),
        (
            {'sizes': {2: (ft.Shape(shard=2), ft.Shape(tensor=2))}},
            'the shapes data 1 x shard 2 and data 1 x tensor 2 have different tensor parts',
        ),
        (
            {
                'sizes': {2: (ft.Shape(shard=2), ft.Shape(pipeline=2))},
                'mode': lambda: ft.Throughput(),
            },
            'whose checkpoints are of different kinds: give a trainer shapes of one kind',
        ),
        (
            {'sizes': {1: ft.Shape(), 2: ft.Shape(tensor=2)}},
            'which give different bits, and which of them are used depends on nodes and speed',
        ),
        ({'sizes': 'all'}, "sizes is 'all'; it must be 'auto' or "),
        ({'sizes': {0: 'auto'}}, "sizes is {0: 'auto'}; it must have node counts, each at least 1"),
        (
            {'sizes': {2: ft.Shape(data=3)}},
            'the shape of 2 nodes is data 3 x spatial 1x1x1 x pipeline 1, which takes 3 '
            'ranks; its parts must '
            'multiply to 2, the ranks of 2 nodes with 1 each',
        ),
        (
            {'sizes': {1: ft.Shape(pipeline=2)}, 'ranks': ft.Ranks(per_node=2)},
            'the mode is reproducible; say mode=Throughput()',
        ),
        (
            {'sizes': {2: ft.Shape(pipeline=2)}, 'mode': ft.Throughput(on_nan='rollback')},
            "on_nan is 'rollback', but a single stage",
        ),
    ):
        with refused(said):
            app(**{k: value() if callable(value) else value for k, value in settings.items()})


def test_another_division_of_layers_does_not_go_on_with_bits_of_checkpoint(tmp_path: Path) -> None:
    """In reproducible mode; elsewhere any shape goes on."""
    for mode in (ft.Reproducible(), ft.Throughput()):
        folder = tmp_path / type(mode).__name__
        whole, halves = (
            app(sizes={2: s}, mode=mode) for s in (ft.Shape(shard=2), ft.Shape(tensor=2))
        )
        claim(folder, 'a', whole.identity(), 'auto')
        if isinstance(mode, ft.Throughput):
            claim(folder, 'a', halves.identity(), 'auto')
            continue
        with refused('which had tensor unset (here 2): put that back'):
            claim(folder, 'a', halves.identity(), 'auto')


@contextmanager
def refused(*said: str) -> Iterator[None]:
    """Bad input is refused with one sentence that says what is wrong."""
    with pytest.raises(ft.BadInput) as caught:
        yield
    text = str(caught.value)
    for words in said:
        assert words in text, text
    assert '\n' not in text
    assert text.endswith('.')


def test_the_decorator_needs_parentheses() -> None:
    with refused("'fit' has no parentheses", '@freetrain_app(total_epochs=10)'):
        ft.freetrain_app(fit)  # type: ignore[call-arg, arg-type]


def test_functions_that_cannot_be_trainers() -> None:
    with refused('takes no positional argument; the first must be the fragment context'):
        ft.freetrain_app(total_epochs=1)(lambda: None)

    def only_keywords(*, ctx: Any) -> None:
        pass

    async def coroutine(ctx: Any) -> None:
        pass

    def generator(ctx: Any) -> Iterator[None]:
        yield

    for function, said in (
        (only_keywords, 'the first must be the fragment context'),
        (functools.partial(Slope(1.0), 0.1), 'the fragment context, is bound already'),
        (coroutine, "'coroutine': it is a coroutine or a generator"),
        (generator, 'a plain function'),
        (Slope.__call__, 'it is a method, which gets no self'),
    ):
        with refused(said):
            ft.freetrain_app(total_epochs=1)(function)


policy: Any = ft.Policy  # to give it what type checkers refuse


def test_settings_of_the_executor() -> None:
    for settings, said in (
        ({'policy': lambda: ft.Policy(metric='fame')}, ("'fame'", 'throughput', 'speedup')),
        ({'max_workers_per_node': -1}, ('max_workers_per_node is -1',)),
        ({'policy': lambda: ft.Policy(horizon_s=0.0)}, ('horizon_s is 0.0',)),
        ({'resume': 'maybe'}, ("resume is 'maybe'", 'auto', 'require', 'never')),
        ({'policy': lambda: ft.Policy(trainers_at_a_time=0)}, ('trainers_at_a_time is 0',)),
        (
            {'policy': lambda: ft.Policy(caps={'anna': 1})},
            ("The cap 'anna' names no user, group or trainer; write 'user NAME' or 'group NAME'",),
        ),
        ({'policy': lambda: ft.Policy(solver_time_limit_s=0.0)}, ('solver_time_limit_s is 0.0',)),
        ({'policy': lambda: policy(objective='x')}, ("no argument 'objective'; it has metric",)),
        ({'horizon_s': 20}, ("no argument 'horizon_s'; say policy=Policy(horizon_s=...)",)),
    ):
        with refused(*said):
            given: dict[str, Any] = {
                name: value() if callable(value) else value for name, value in settings.items()
            }
            ft.FreeTrainExecutor(provider=ft.BackfillProvider(site=ft.LocalSite(nodes=1)), **given)


def test_stated_rates_count_for_no_more_than_the_shards_allow() -> None:
    for settings, rates in (
        ({}, (1.0, 1.9, 2.0, 3.4)),  # as many shards as nodes
        ({'mode': ft.Reproducible(shards=12)}, (1.0, 1.9, 2.7, 3.4)),
        ({'mode': ft.Reproducible(shards=8)}, (1.0, 1.9, 8 / 3, 3.4)),
        ({'mode': ft.Reproducible(shards=12), 'ranks': ft.Ranks(per_node=2)}, (1.0, 1.9, 2.7, 3.0)),
        ({'mode': ft.Throughput()}, (1.0, 1.9, 2.7, 3.4)),
    ):
        stated = {1: 1.0, 2: 1.9, 3: 2.7, 4: 3.4}
        trainer = app(max_nodes=4, scaling=ft.Scaling(rate=stated), **settings).spec.trainer('fit')
        assert trainer.curve is not None
        assert tuple(map(trainer.curve.rate_at, range(1, 5))) == pytest.approx(rates)
        by_class = ft.Scaling(class_rates={'a100': {1: 2.0, 4: 7.0}})
        trainer = app(max_nodes=4, scaling=by_class, **settings).spec.trainer('fit')
        ((name, curve),) = trainer.class_curves
        assert (name, curve.rate_at(4)) == ('a100', 7.0 if rates[3] == 3.4 else 6.0)


def test_a_trainer_that_the_metric_cannot_judge_is_refused() -> None:
    trainer = app(min_nodes=2, max_nodes=3).spec.trainer('fit')
    for metric, said in (
        ('rate / remaining_samples', "'fit' has no remaining_samples"),
        ('rate / (nodes - 3)', 'the objective is -'),
        ('log(0 * rate)', 'has no value at 2 nodes'),
    ):
        with refused(said):
            check_trainer(trainer, metric, 0, 0.0)
    late = app(total_epochs=None, goal=ft.Samples(5, finish_by=10.0)).spec.trainer('fit')
    check_trainer(late, 'deadline', 0, 20.0)


def test_all_shapes_that_divide_the_ranks_and_that_the_mode_supports() -> None:
    """In reproducible mode 'shard' is a power of two, and data x shard divides the shards."""
    two_each = ft.Ranks(per_node=2)
    throughput = ft.freetrain_app(
        sizes={1: 'auto', 3: 'auto'}, mode=ft.Throughput(), ranks=two_each, total_epochs=1
    )(fit).spec
    assert throughput.shapes == {
        1: (ft.Shape(shard=2), ft.Shape(data=2)),
        3: (
            ft.Shape(shard=6),
            ft.Shape(data=2, shard=3),
            ft.Shape(data=3, shard=2),
            ft.Shape(data=6),
        ),
    }
    shapes = ('data 1 x shard 2', 'data 2 x spatial 1x1x1 x pipeline 1')
    assert throughput.trainer('t').shapes[0] == (1, shapes)
    reproducible = ft.freetrain_app(max_nodes=4, sizes='auto', total_epochs=1)(fit).spec
    assert reproducible.shapes == {
        1: (ft.Shape(),),
        2: (ft.Shape(shard=2), ft.Shape(data=2)),
        3: (ft.Shape(data=3),),
        4: (ft.Shape(shard=4), ft.Shape(data=2, shard=2), ft.Shape(data=4)),
    }
    assert [nodes for nodes, _ in reproducible.trainer('t').shapes] == [1, 2, 3, 4]


def test_sizes_and_shapes_say_how_many_nodes() -> None:
    for settings in ({'sizes': [4, 2]}, {'sizes': {2: ft.Shape(data=2), 4: ft.Shape(data=4)}}):
        trainer = app(**settings).spec.trainer('fit')
        assert (trainer.min_nodes, trainer.max_nodes, trainer.sizes) == (2, 4, (2, 4))
    when = datetime(2030, 1, 31, 18, tzinfo=UTC)
    late = app(total_epochs=None, goal=ft.Samples(5, finish_by=when)).spec.trainer('fit')
    assert late.finish_by_s == when.timestamp()


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[ft.FreeTrainExecutor]:
    """An executor without a hole in sight, since nothing in these tests is to start."""
    nothing_idle = Schedule([IdleInterval(1e6, 1e6 + 1, 'later')])
    with freetrain(tmp_path, ft.LocalSite(nodes=1, schedule=nothing_idle)) as started:
        yield started


def test_calls_that_can_never_work(executor: ft.FreeTrainExecutor) -> None:
    """Each is refused with a sentence, and leaves no checkpoint folder and no trainer behind."""
    root = Path(executor.checkpoint_dir)
    lock = threading.Lock()

    def locked(ctx: Any, thing: Any = None) -> None:
        with lock:
            pass

    with refused("'locked'", 'cannot be serialised', 'locks'):
        ft.freetrain_app(total_epochs=1)(locked)()
    with socket.socket() as connection:

        def connected(ctx: Any) -> None:
            connection.send(b'')

        with refused('connected', 'cannot be serialised'):
            ft.freetrain_app(total_epochs=1)(connected)()
        with refused("argument 'pause_s'", 'cannot be serialised'):
            app()(pause_s=connection)
    with refused('argument 1', 'cannot be serialised'):
        app()(lock)

    every = 'it has pause_s, fail_at, trainer_name'
    strange = {'nothing_like_this': every, 'ctx': every, 'pauses': 'say pause_s'}
    for wrong, right in strange.items():
        given: dict[str, Any] = {wrong: 1}
        with refused(f"Trainer 'fit' has no argument {wrong!r}; {right}"):
            app()(**given)
    with refused("'fit': too many positional arguments", 'function is fit(ctx, pause_s, fail_at)'):
        app()(1, 2, 3)
    for name in ('a/b', '../up', '.', '', 'a b', '-a'):
        with refused('cannot name a trainer', 'begin with no dot and no dash'):
            app()(trainer_name=name)
    for name in ('requests', 'environment', 'ledger.journal'):
        with refused(f'{name!r} cannot name a trainer', 'give another trainer_name'):
            app()(trainer_name=name)
    with refused("resume is 'require'", 'no folder'):
        app(checkpoints=ft.Checkpoints(resume='require'))(trainer_name='never-trained')
    with refused("'elsewhere'", "'freetrain'"):
        app(executor='elsewhere')()
    assert {path.name for path in root.iterdir()} <= {
        'ledger.journal',
        'ledger.journal.part',  # while something is written
        'logs',
        'requests',
        'run.json',
    }

    foreign = root / 'foreign'
    foreign.mkdir(mode=0o700)
    (foreign / 'thesis.tex').touch()
    with refused('not empty'):
        app()(trainer_name='foreign')
    (root / 'file').touch()
    with refused('cannot be written'):
        app()(trainer_name='file')


def test_names_are_taken_once(
    executor: ft.FreeTrainExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused call takes no name; two others cannot share one; a failed start frees it."""
    with pytest.raises(ft.BadInput):
        app()(threading.Lock(), trainer_name='mine')
    first = app()(trainer_name='mine')
    with refused("'mine'", 'another trainer_name'):
        app()(trainer_name='mine')
    second, third = named('numbered')(), named('numbered')()
    assert [second.name, third.name] == ['numbered', 'numbered-2']
    with refused("'numbered-2'"):
        app()(trainer_name='numbered-2')
    app()(trainer_name='counted-2')
    assert {named('counted')().name for _ in range(2)} == {'counted', 'counted-3'}
    for future in (first, second, third):
        assert future.cancel()
    coming: Future[Any] = Future()
    waiting = app()(coming, trainer_name='late')
    assert waiting.state == 'waiting'
    coming.set_result(threading.Lock())
    with refused("'late'", 'argument 1', 'cannot be serialised'):
        waiting.result(LIMIT_S)
    assert waiting.state == 'failed'
    assert app()(trainer_name='late').cancel()
    # What the executor's metric cannot judge is refused before anything is waited for.
    monkeypatch.setattr(executor, 'policy', ft.Policy(metric='rate / remaining_samples'))
    with refused("'unjudged' has no remaining_samples"):
        app()(Future(), trainer_name='unjudged')


@dataclasses.dataclass
class Settings:
    deep: dict[str, Any]


class Slope:
    """A callable object, with what functools.partial gives it."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __call__(self, ctx: Any, inputs: Any = (), *, more: Any = None) -> None:
        found = [self.slope, *inputs, more.deep['here'][0], *more.deep['set']]
        assert found == [7.0, 1, 2, [3], 4], found
        fit(ctx)


def test_futures_anywhere_in_the_arguments_become_their_values(tmp_path: Path) -> None:
    """As in Parsl's apps; also inside objects, in values of futures, and under ``debug``."""
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2)):
        one, two, three, four, late = (Future[Any]() for _ in range(5))
        train = ft.freetrain_app(total_epochs=1)(
            functools.partial(Slope(7.0), more=Settings({'here': (three,), 'set': {4}}))
        )
        assert train.name == 'Slope' and train.__wrapped__ is train.function
        more = Settings({'here': (three,), 'set': [four]})
        future = train([one, late], more=more)
        two.set_result(2)
        for waited, value in ((one, 1), (three, [3]), (four, 4)):
            assert future.state == 'waiting'
            waited.set_result(value)
        late.set_result(two)  # a value with a future in it
        assert future.result(LIMIT_S).samples == 96
        here = {'here': [[3]], 'set': (4,)}
        train.debug(inputs=[one, two], more=Settings(here))

        failed: Future[Any] = Future()
        failed.set_exception(OSError('no disk'))
        with pytest.raises(ft.TrainerFailed, match='one of its arguments failed: OSError: no disk'):
            app()({'a': [failed]}).result(LIMIT_S)

        def around(ctx: Any) -> None:
            late.result()

        with refused("'around'", 'its function uses a future', 'pass the future as an argument'):
            ft.freetrain_app(total_epochs=1)(around)()


def test_the_folder_is_fixed_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not changed by os.chdir; two executors of a program cannot share one."""
    for name in ('one', 'two'):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / 'one')
    provider = ft.BackfillProvider(site=ft.LocalSite(nodes=1))
    ours = ft.FreeTrainExecutor(provider=provider, recording=ft.Recording(ledger='led'))
    monkeypatch.chdir(tmp_path / 'two')
    assert ours.checkpoint_dir == str(tmp_path / 'one' / 'checkpoints')
    assert ours.ledger_path == tmp_path / 'one' / 'led'
    lock = RunLock(tmp_path, 'run freetrain')
    lock.take_folder()
    with refused("Executor 'freetrain' of this program has the checkpoint_dir", 'of its own'):
        RunLock(tmp_path, 'run other').take_folder()
    lock.free_folder()


def test_a_trainer_cancelled_while_it_is_serialised_does_not_start(
    executor: ft.FreeTrainExecutor,
) -> None:
    """And whoever settles the argument, the event loop for instance, does not wait for that."""
    serialises, go = threading.Event(), threading.Event()

    class Large:
        def __reduce__(self) -> tuple[Any, ...]:
            serialises.set()
            go.wait(20.0)
            return int, ()

    coming: Future[Any] = Future()
    future = app()(coming, trainer_name='large')
    coming.set_result(Large())
    assert not go.is_set() and serialises.wait(LIMIT_S)
    assert future.cancel() and future.state == 'cancelled'
    assert not future.cancel()
    go.set()

    def name_is_free() -> bool:
        try:
            return bool(app()(trainer_name='large').cancel())
        except ft.BadInput:
            return False

    wait_until(name_is_free, 'the trainer was submitted', 60.0)
    assert future.cancelled() and future.state == 'cancelled'


def test_a_trainer_that_waits_for_an_argument_fails_with_its_executor(tmp_path: Path) -> None:
    with freetrain(tmp_path, ft.LocalSite(nodes=1)):
        future = app()(Future(), trainer_name='patient')
        assert future.state == 'waiting'
    with pytest.raises(ft.TrainerFailed, match="'patient' was not started: its arguments were not"):
        future.result(0)
    assert future.state == 'failed'


@pytest.mark.parametrize('below', ['file', 'proc'])
def test_checkpoint_folders_that_cannot_be_written(below: str, tmp_path: Path) -> None:
    """The executor says so at its start."""
    (tmp_path / 'file').touch()
    folder = {'file': str(tmp_path / 'file' / 'checkpoints'), 'proc': '/proc/checkpoints'}[below]
    with refused(folder, 'cannot be written'):
        provider = ft.BackfillProvider(site=ft.LocalSite(nodes=1))
        load(tmp_path, ft.FreeTrainExecutor(provider=provider, checkpoint_dir=folder))


def load(folder: Path, *executors: Any, **settings: Any) -> Any:
    given = {'strategy': 'none', 'run_dir': str(folder / 'runinfo'), **settings}
    return parsl.load(Config(executors=list(executors), **given))


def test_without_parsl_or_without_the_executor(tmp_path: Path) -> None:
    with pytest.raises(
        ft.BadInput, match='Parsl has no configuration: call parsl.load .* freetrain run FILE'
    ):
        app()()
    with load(tmp_path, ThreadPoolExecutor()), refused('needs a FreeTrainExecutor', 'none'):
        app()()


def test_debugging_in_the_own_process() -> None:
    """Without Parsl, with what the function prints, raises and returns."""

    def train(ctx: Any, slope: float) -> list[float]:
        fit(ctx, fail_at=40 if slope < 0 else None)
        return [slope, float(os.getpid())]

    trainer = ft.freetrain_app(max_nodes=4, total_epochs=2)(train)
    coming: Future[float] = Future()
    coming.set_result(2.0)
    done = trainer.debug(coming)
    assert (done.samples, done.path, done.result) == (192, '', [2.0, os.getpid()])
    assert done.metrics.keys() == {'loss'}
    with pytest.raises(ValueError, match='no more after 40 samples'):
        trainer.debug(slope=-1.0)


def test_debugging_begins_with_the_function(tmp_path: Path) -> None:
    """What takes long is not imported before its first line, and no process is started."""
    script = tmp_path / 'my first lines.py'
    script.write_text(
        'import sys, psutil\n'
        'from parsl_freetrain import freetrain_app\n'
        '@freetrain_app(total_epochs=1)\n'
        'def train(ctx):\n'
        '    slow = {"highspy", "jinja2", "matplotlib", "pandas", "pulp", "pyarrow", "scipy"}\n'
        '    print(slow & sys.modules.keys(), psutil.Process().children())\n'
        '    sys.exit("first line")\n'
        'train.debug()\n'
    )
    ended = run_to_end([sys.executable, script], cwd=tmp_path)
    assert ended.returncode == 1 and 'first line' in ended.stderr
    assert ended.stdout.splitlines()[-1] == 'set() []'


def test_debugging_ends_while_a_worker_of_a_loader_still_runs() -> None:
    workers = []

    def train(ctx: Any) -> None:
        workers.append(get_context('fork').Process(target=signal.pause, daemon=True))
        workers[0].start()
        fit(ctx)

    try:
        assert ft.freetrain_app(total_epochs=1)(train).debug().samples == 96
        assert workers[0].is_alive()
    finally:
        workers[0].kill()
        workers[0].join()


def test_parsl_memoizes_what_follows_a_training(tmp_path: Path) -> None:
    """The same checkpoint is the same argument, another one is not."""
    calls: list[int] = []

    @python_app(executors=['threads'], cache=True)
    def follow(checkpoint: ft.Checkpoint) -> int:
        calls.append(checkpoint.samples)
        return checkpoint.samples

    with load(tmp_path, ThreadPoolExecutor(label='threads')):
        for samples in (8, 8, 9):
            done = ft.Checkpoint('fit', f'/c/ckpt-{samples}-f1', samples, 1, {'loss': 0.5})
            assert follow(done).result(LIMIT_S) == samples
    assert calls == [8, 9]


@pytest.mark.long
def test_other_executors_beside_ours_and_any_strategy(tmp_path: Path) -> None:
    """Parsl's own way of scaling leaves our blocks alone, and scales the other executor's. Parsl
    waits for trainers as for its tasks, and a join app of one ends with it, however that ends.
    """

    @python_app(executors=['threads'])
    def in_threads(checkpoint: ft.Checkpoint) -> int:
        return checkpoint.samples

    @python_app(executors=['stock'])  # here, so that its worker does not import this module
    def in_stock(checkpoint: ft.Checkpoint, samples: int) -> tuple[int, int]:
        return checkpoint.samples, samples

    ours = ft.FreeTrainExecutor(
        provider=ft.BackfillProvider(site=ft.LocalSite(nodes=1, poll_s=0.2), min_hole_s=1.0),
        checkpoint_dir=str(tmp_path / 'checkpoints'),
        max_workers_per_node=1,
        policy=ft.Policy(idle_block_s=LIMIT_S),
    )
    stock = HighThroughputExecutor(
        label='stock',
        address='127.0.0.1',
        max_workers_per_node=1,
        cores_per_worker=0.1,
        provider=LocalProvider(init_blocks=0, max_blocks=1),  # type: ignore[no-untyped-call]
    )
    more = {'strategy': 'simple', 'max_idletime': 0.5, 'strategy_period': 0.2, 'exit_mode': 'wait'}
    with load(tmp_path, ours, stock, ThreadPoolExecutor(label='threads'), **more):
        first = app()()
        assert in_stock(first, in_threads(first)).result(LIMIT_S) == (96, 96)
        # Idle blocks stay for a while, longer than Parsl's strategy would leave them.
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and ours.connected_managers():
            time.sleep(0.1)
        assert ours.connected_managers()
        held = app()(Future[Any]())
        joined = join_app(lambda: held)()
        held.cancel()
        with pytest.raises(JoinError):
            joined.result(LIMIT_S)
        last = app()(pause_s=0.05)
    assert last.done() and last.result().samples == 96
    with refused('was started before', 'make a new one'):
        ours.start()


MODULE = """
import torch

SLOPE = 3.0

def network():
    return torch.nn.Linear(4, 1)
"""
BODY = """\
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    x = torch.ones(8, 4)
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    for features, target in ctx.loop(dataset, batch_size=8):
        optimizer.zero_grad()
        ((model(features) - target) ** 2).mean().backward()
        optimizer.step()
"""
MAIN_MODULE = f"""
from {{helper}} import SLOPE, network
import torch

def train(ctx, bonus):
    model, optimizer = network(), None
{BODY}    ctx.report(slope=SLOPE + bonus, threads=torch.get_num_threads())
"""


def test_functions_in_modules_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One beside the script, which imports another one beside it."""
    place = tmp_path / 'beside'
    (place / 'own_package').mkdir(parents=True)
    (place / 'own_package' / '__init__.py').touch()
    (place / 'own_package' / 'helper.py').write_text(MODULE)
    (place / 'own_package' / 'training.py').write_text(
        MAIN_MODULE.format(helper='own_package.helper')
    )
    (place / 'own_helper.py').write_text(MODULE)
    (place / 'own_training.py').write_text(MAIN_MODULE.format(helper='own_helper'))
    monkeypatch.syspath_prepend(str(place))
    with freetrain(tmp_path, ft.LocalSite(nodes=1, poll_s=0.2)):
        futures: list[ft.TrainingFuture] = []
        for module in ('own_training', 'own_package.training'):
            function = importlib.import_module(module).train
            made = ft.freetrain_app(total_epochs=1, ranks=ft.Ranks(threads=len(futures) + 2))(
                function
            )
            futures.append(made(0.5, trainer_name=module))
        metrics = [future.result(LIMIT_S).metrics for future in futures]
        assert [(found['slope'], found['threads']) for found in metrics] == [(3.5, 2.0), (3.5, 3.0)]


SCRIPT = f"""
import json, sys
import torch
from pathlib import Path
from parsl_freetrain import LocalSite, freetrain_app
from tests.support.training import freetrain

SLOPE = 3.0

class Network(torch.nn.Linear):
    pass

@freetrain_app(total_epochs=1)
def train(ctx, bonus):
    model = Network(4, 1)
{BODY}    ctx.report(slope=SLOPE + bonus)
    return {{'bonus': bonus}}

if __name__ == '__main__':
    with freetrain(Path(sys.argv[1]), LocalSite(nodes=1, poll_s=0.2)):
        done = train(0.5).result()
        print(json.dumps({{**done.metrics, **done.result}}))
"""


@pytest.mark.usefixtures('nodes_share_a_template')
def test_functions_of_a_script(tmp_path: Path) -> None:
    """Those of a notebook's cells: tests/executor/trainer/test_notebook.py."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    environment = {**os.environ, 'PYTHONPATH': os.getcwd()}
    done = run_to_end([sys.executable, tmp_path / 'script.py', tmp_path], env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found['slope'], found['bonus']) == (3.5, 0.5)

"""Chaos: a training struck at random moments gives the undisturbed run's weights: ``python -m
tests.chaos.monkey --fragments 200 --seed 1``; status 1 if anything was lost or changed.
"""

import argparse
import contextlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
from msgspec import structs

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import History
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.training.checkpoint.export import same_weights
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.spec.diloco import replica_folder, replica_name
from tests.chaos import fault_kinds, limits, training
from tests.chaos.disks import small_disk
from tests.chaos.training import BATCH, NAME, REPLICAS, ROUNDS_EPOCHS, SAMPLES
from tests.support import template
from tests.support.computers import Computer, computers
from tests.support.file_system_shim import Shim, compiler
from tests.support.processes import victims
from tests.support.ranks import order, ranks, running_fork_server
from tests.support.training import weights
from tests.support.waiting import LIMIT_S, looks

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = 'FREETRAIN_CHAOS_RUN'
SLOW_S = 15.0
SENTENCES = r'^(parsl_freetrain\.core\.model\.errors\.\w+: |KeyboardInterrupt)'
"""With which the submitting process may end by itself: without an interchange, on a full disk."""


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class Run:
    """A training in a folder, with all processes that belong to it."""

    folder: Path
    nodes: int
    starts: int = 0
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None
    shim: Shim | None = None
    computers: Sequence[Computer] = ()  # the one that submits, and the nodes, if they are others
    overlap: int | None = None  # of a training in rounds
    epochs: int = 10**6

    @property
    def store(self) -> Path:
        return self.folder / 'checkpoints' / NAME

    @property
    def stores(self) -> list[PosixCheckpointStore]:
        """Of the trainer, or of each of its replicas."""
        count = 1 if self.overlap is None else REPLICAS
        each = ((replica_folder(self.store, k), replica_name(NAME, k)) for k in range(count))
        return [PosixCheckpointStore(*one) for one in each]

    @property
    def output(self) -> Path:
        return self.folder.parent / 'output'

    @property
    def orders(self) -> Path:
        return training.orders_in(self.folder)

    def start(self, *, struck: bool = True) -> None:
        self.starts += 1
        self.orders.mkdir(parents=True, exist_ok=True)
        nodes = ','.join(one.name for one in self.computers[1:]) or str(self.nodes)
        words = [sys.executable, '-m', 'tests.chaos.training', str(self.folder), str(self.epochs)]
        words += [nodes, str(0.02 * struck)]
        words += [] if self.overlap is None else [str(self.overlap)]
        with self.output.open('ab') as output:
            self.process = subprocess.Popen(
                self.computers[0].command(words) if self.computers else words,
                cwd=ROOT,
                env={
                    **os.environ,
                    **(self.shim.environment if self.shim else {}),
                    MARK: self.mark,
                    'PYTHONPATH': str(ROOT),
                },
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def finished(self) -> bool:
        """Whether a training in rounds, which cannot be without an end, has come there."""
        ended = self.process is not None and self.process.poll() == 0
        return self.overlap is not None and ended

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def of_kind(self, kind: str) -> list[psutil.Process]:
        return victims(kind, self.processes())

    def kill(self) -> None:
        """All of it, and what is started meanwhile."""
        for _ in looks():
            found = self.processes()
            if self.running() and self.process is not None:
                self.process.kill()
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not found and not self.running():
                return
        raise Broken(f'these processes do not end: {self.processes()}')

    def history(self) -> History:
        """Of its journal; empty as long as that cannot be read."""
        with contextlib.suppress(BadInput):
            return Journal(self.folder / 'checkpoints' / 'ledger.journal').history()
        return History()

    def fragments(self) -> int:
        """As their store counts them: journals that are damaged, as some faults do, forget them."""
        return sum(store.last_fragment() for store in self.stores)

    def saved(self) -> int:
        saved = [c.samples for run in self.history().runs for c in run.checkpoints]
        return max(saved, default=0)


class Monkey:
    """Strikes."""

    def __init__(
        self,
        run: Run,
        seed: int,
        kinds: Collection[str],
        say: Callable[[str], None],
        pairs: bool = False,
    ) -> None:
        self.run = run
        self.draw = random.Random(seed)
        self.kinds = {
            kind: weight for kind, (weight, _) in fault_kinds.KINDS.items() if kind in kinds
        }
        self.counts: Counter[str] = Counter()
        self.say, self.pairs, self.struck = say, pairs, 0
        self.order = list(self.kinds)  # each kind once, then at random
        self.draw.shuffle(self.order)

    def strike_until(self, fragments: int, faults: int) -> None:
        """Strike until there were so many fragments and faults; the trainer recovers from each."""
        order = self.order
        self.run.start()
        while self.run.fragments() < fragments or self.struck < faults or order:
            if self.run.finished():
                return
            self.struck += 1
            before, since = self.run.saved(), time.monotonic()
            time.sleep(self.draw.expovariate(1 / 0.5))
            kind = (
                order.pop()
                if order
                else self.draw.choices(list(self.kinds), list(self.kinds.values()))[0]
            )
            for _ in looks(math.inf):
                if fault_kinds.strike(self.run, self.draw, kind) or self.run.finished():
                    break
                self.keep_going(since, kind)
            self.counts[kind] += 1
            if self.pairs:
                self._strike_again()
            for _ in looks(math.inf):
                if self.run.saved() > before or self.run.finished():
                    break
                self.keep_going(since, kind)
            took = time.monotonic() - since
            if took > SLOW_S or not sum(self.counts.values()) % 20:
                self.say(
                    f'{took:.1f} s for {kind!r}; '
                    f'{self.run.fragments()} fragments, {self.run.saved()} samples, '
                    f'faults: {dict(self.counts)}'
                )

    def _strike_again(self) -> None:
        """A second fault of any kind, within 200 ms."""
        time.sleep(self.draw.uniform(0.0, 0.2))
        other = self.draw.choice(list(self.kinds))
        self.counts['and ' + other] += fault_kinds.strike(self.run, self.draw, other)

    def keep_going(self, since: float, kind: str) -> None:
        if not (self.run.running() or self.run.finished()):
            if self.run.process is not None and (status := self.run.process.returncode) >= 0:
                self.counts['ends of the submitting process by itself'] += 1
                said = self.run.output.read_text(errors='replace')[-1500:]
                ended = f'it ended by itself after {kind!r}, with status {status}'
                traceback = said.rpartition('Traceback')[2]
                # Python may not be able to import what the program needs, on a system that fails.
                begun = ', in main' in traceback or not re.search('^OSError: ', traceback, re.M)
                if begun and not re.search(SENTENCES, traceback, re.MULTILINE):
                    raise Broken(f'{ended}, without a sentence')
                self.say(f'{ended}: {said[-300:]}')
            self.run.start()
        if time.monotonic() > since + LIMIT_S:
            history = self.run.history()
            latest = [(f.launched, f.started_at, f.ended) for f in history.fragments[-5:]]
            nodes = history.nodes[-6:]
            alive = [
                (p.pid, p.ppid(), p.status(), ' '.join(p.cmdline())[:90])
                for p in self.run.processes()
            ]
            print('\n'.join(map(str, alive)))
            if self.run.process is not None:
                self.run.process.send_signal(signal.SIGUSR2)
                time.sleep(1.0)
            raise Broken(
                f'no progress any more for {LIMIT_S:g} s after {kind!r} at '
                f'{time.time():.1f}; last fragments: {latest}, '
                f'nodes: {nodes}, faults: {dict(self.counts)}'
            )


def unverified(run: Run) -> Counter[str]:
    """Why resumes were not verified. Broken: training behind the checkpoint had been heard of."""
    heard, why = Counter[tuple[str, int]](), Counter[str]()
    for journal in run.store.parent.glob('ledger.journal*'):
        with contextlib.suppress(BadInput):
            for _, event in Journal(journal).events(ev.FragmentProgressed):
                assert isinstance(event, ev.FragmentProgressed)
                one = event.trainer, event.fragment
                heard[one] = max(heard[one], event.samples)
    places = [(one.trainer, one.folder.glob('logs/fragment-*-rank-0.log')) for one in run.stores]
    for name, log in ((name, log) for name, logs in places for log in sorted(logs)):
        text = log.read_text(errors='replace')
        if found := re.search(r'Not verified: the step after (\d+)', text):
            saved = re.search(rf'from checkpoint \S*ckpt-0*{found[1]}-f(\d+)', text)
            why['a checkpoint' if saved else 'what survivors have left'] += 1
            if saved and heard[name, int(saved[1])] > int(found[1]):
                raise Broken(f'{name}, {log.name}: {found[0]}, and more had been heard of')
    return why


def final(folder: Path) -> Checkpoint:
    checkpoint = PosixCheckpointStore(folder / 'checkpoints' / NAME, NAME).latest()
    if checkpoint is None:
        raise Broken(f'{folder} holds no checkpoint')
    return checkpoint


def to_the_end(run: Run) -> Checkpoint:
    """Train without faults."""
    run.start(struck=False)
    assert run.process is not None
    status = run.process.wait(LIMIT_S)
    if status:
        raise Broken(f'the last run ended with status {status}')
    return final(run.folder)


def undisturbed(folder: Path, epochs: int, overlap: int | None = None) -> Checkpoint:
    """The same training on one rank; in rounds, one piece after another."""
    folder.mkdir()
    diloco = None if overlap is None else training.in_rounds(overlap)
    inner = training.INNER if diloco else training.MODE
    pieces = (
        [(n, k) for n in range(1, training.ROUNDS + 1) for k in range(REPLICAS)] if diloco else []
    )
    with running_fork_server(folder) as server:
        for fragment, replica in (*pieces, (training.ROUNDS + 1, 0)):
            whole = order(
                folder,
                fragment,
                trainer=replica_name(NAME, replica),
                store=str(replica_folder(folder / 'store', replica)),
                total_epochs=epochs,
                shards=inner.shards,
                seed=inner.seed,
            )
            spec = structs.replace(whole.spec, diloco=diloco, replica=replica)
            with ranks(server, replace(whole, spec=spec), 1, folder, training.counted) as gang:
                outcome = gang.run()[0]
    return Checkpoint(NAME, outcome.path, outcome.samples, 1)


def totals(run: Run) -> Counter[str]:
    """What has become of a training."""
    fragments = run.history().fragments
    found = Counter({'trainings': 1, 'fragments': len(fragments)})
    found.update(str(one.ending or 'cut off') for one in fragments)
    for store in run.stores:
        found['damaged checkpoints set aside'] += len(list((store.folder / 'bad').glob('ckpt-*')))
        if (newest := store.latest()) is not None:
            there = read_state(newest.path).position
            found.update(resumes=there.resumes, verified=there.verified)
    return found


def check(ended: Checkpoint, alone: Checkpoint, epochs: int, counts: bool = True) -> None:
    """Bit for bit the same, and every sample counted once per epoch."""
    if not ended.samples == alone.samples == epochs * SAMPLES:
        raise Broken(
            f'{ended.samples} samples were trained, {alone.samples} without chaos, '
            f'{epochs * SAMPLES} were wanted'
        )
    count = weights(ended)['count']
    if counts and not torch.equal(count, torch.full((SAMPLES,), epochs / BATCH)):
        raise Broken(f'samples do not count {epochs} times each: {(count * BATCH).tolist()}')
    if not same_weights(ended, alone):
        raise Broken('the weights differ from those of the undisturbed run')


def chaos(
    fragments: int,
    seed: int,
    nodes: int,
    folder: Path,
    say: Callable[[str], None] = print,
    kinds: Collection[str] = tuple(fault_kinds.KINDS),
    faults: int = 0,
    pairs: bool = False,
    computers: Sequence[Computer] = (),
    overlap: int | None = None,
) -> Counter[str]:
    """One run of chaos with faults of these kinds; what was done, by kind. Broken: a promise.
    ``overlap``: of trainings in rounds, one after the other until there were so many faults.
    """
    began = time.monotonic()
    with small_disk(folder / 'struck' / 'checkpoints') as disk:
        shim = Shim(folder) if compiler() else None
        run = Run(folder / 'struck', nodes, shim=shim, computers=computers, overlap=overlap)
        left_out: tuple[str, ...] = () if disk else fault_kinds.ON_SMALL_DISK
        left_out += () if shim else fault_kinds.WITH_SHIM
        left_out += () if limits.possible() else fault_kinds.IN_GROUPS
        left_out += () if computers else fault_kinds.ON_COMPUTERS
        left_out += fault_kinds.IN_ROUNDS if overlap is None else fault_kinds.NOT_IN_ROUNDS
        possible = {kind for kind in kinds if kind not in left_out}
        monkey = Monkey(run, seed, possible, say, pairs)
        alone: Checkpoint | None = None
        if overlap is not None:
            run.epochs = ROUNDS_EPOCHS
            alone = undisturbed(folder / 'alone', run.epochs, overlap)
        found, why = Counter[str](), Counter[str]()
        try:
            while True:
                monkey.strike_until(fragments, faults)
                finished = run.finished()
                run.kill()
                why.update(unverified(run))  # the logs go when the training ends
                if overlap is None:
                    run.epochs = run.saved() // SAMPLES + 2
                ended = final(run.folder) if finished else to_the_end(run)
                known = alone or undisturbed(folder / 'alone', run.epochs)
                check(ended, known, run.epochs, counts=overlap != 0)
                found.update(totals(run))
                if not finished:
                    break
                run.folder = folder / f'struck-{found["trainings"]}'
            say(
                f'{dict(found)}, {run.starts} starts of the workflow, {run.epochs} epochs of '
                f'{SAMPLES} samples, {time.monotonic() - began:.0f} s; not verified (those that '
                f'saved nothing included): {dict(why)}; '
                f'seed {seed}, {nodes} nodes, faults: {dict(monkey.counts)}.'
            )
            said = 'The weights are those of the undisturbed run, bit for bit'
            say(f'{said}; every sample was counted once per epoch.' if overlap != 0 else f'{said}.')
        finally:
            run.kill()
            if shim:
                shim.close()
    return monkey.counts


def main() -> int:
    """As the command line says."""
    parser = argparse.ArgumentParser(
        description='Strikes a training at random, and compares its weights with those of an '
        'undisturbed run.'
    )
    parser.add_argument('--fragments', type=int, default=200)
    parser.add_argument('--faults', type=int, default=0, help='and at least this number of faults')
    parser.add_argument('--pairs', action='store_true', help='two faults at once, each time')
    parser.add_argument('--kinds', help='only these, with commas between them')
    parser.add_argument('--overlap', type=int, choices=(0, 1), help='trainings in rounds')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--nodes', type=int, default=3)
    parser.add_argument('--computers', action='store_true', help='each node is one of its own')
    parser.add_argument('--folder', type=Path, help='kept; default: a temporary one')
    given = parser.parse_args()
    # Beside a shell it is ignored, and so it would be in what is started, until that has begun.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it has started is ended
    with tempfile.TemporaryDirectory(prefix='freetrain-chaos-') as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            others = computers(given.nodes + 1) if given.computers else contextlib.nullcontext(())
            with template.shared(folder / 'template.log'), others as made:
                chaos(
                    given.fragments,
                    given.seed,
                    given.nodes,
                    folder,
                    lambda line: print(line, flush=True),
                    faults=given.faults,
                    kinds=given.kinds.split(',') if given.kinds else tuple(fault_kinds.KINDS),
                    pairs=given.pairs,
                    computers=made,
                    overlap=given.overlap,
                )
        except AssertionError as broken:
            print(f'BROKEN: {broken}')
            print((folder / 'output').read_text(errors='replace')[-4000:])
            return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())

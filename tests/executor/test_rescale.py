"""Rescaling while training goes on: the next ranks are ready, the state is in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import parsl_freetrain as ft
from parsl_freetrain.core.allocation.problem import problem_in
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.journal.read import Journal
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

SCALING = {1: 1.0, 2: 1.9}


def loads_first(ctx: ft.FragmentContext, go: str) -> None:
    """As ``fit``, but says when it has its data, and is slow until ``go``; a large state."""
    from parsl_freetrain.training.loop import checkpointer

    vars(checkpointer)['LARGE_BYTES'] = 0
    print('loaded')

    class Paced:
        def __getattr__(self, name: str) -> Any:
            return getattr(ctx, name)

        def report(self, **numbers: float) -> None:
            if not Path(go).exists():
                time.sleep(0.1)

    fit(Paced())  # type: ignore[arg-type]


def costs_bid(ledger: Path, name: str) -> tuple[float, float]:
    """What the newest question to the allocator took a rescale to cost."""
    asked = [d.document for d in Journal(ledger).history().runs[-1].decisions]
    found = [b for d in asked if d for b in problem_in(d).bids if b.name == name]
    return found[-1].rescale_up_s, found[-1].rescale_down_s


@pytest.mark.long
def test_trainer_moves_to_faster_class_and_uses_two_at_once_with_same_bits(tmp_path: Path) -> None:
    soon, go = tmp_path / 'soon', tmp_path / 'go'

    def trainer(nodes: int = 1, **rate: dict[int, float]) -> Any:
        scaling = ft.Scaling(
            class_rates=rate, mixed=nodes > 1, rescale_up_s=0.25, rescale_down_s=0.25
        )
        mode = ft.Reproducible(shards=3)
        return ft.freetrain_app(max_nodes=nodes, total_epochs=20, scaling=scaling, mode=mode)(
            loads_first
        )

    site = ft.LocalSite(
        2, poll_s=0.2, node_classes={'slot00': 'fast', 'slot01': 'slow'}, class_speeds={'slow': 0.5}
    )
    with freetrain(tmp_path, site, horizon_s=60.0) as executor:
        before = trainer(fast={1: 9.0})(str(soon), trainer_name='before')
        wait_until(lambda: before.progress().samples > 0, 'the fast node is not used')
        moved = trainer(fast={1: 4.0}, slow={1: 1.0})(str(go), trainer_name='moved')
        wait_until(lambda: moved.progress().samples > 0, 'the slow node is not used')
        soon.touch()
        alone = before.result(LIMIT_S)

        def moves() -> bool:
            run = Journal(executor.ledger_path).history().runs[0]
            return len(run.trainers['moved'].fragments) > 1

        wait_until(moves, 'it does not move to the fast node')
        go.touch()
        result = moved.result(LIMIT_S)
        rates: dict[str, dict[int, float]] = {'fast': {1: 1.0, 2: 2.0}, 'slow': {1: 0.5, 2: 1.0}}
        both = trainer(2, **rates)(str(go), trainer_name='both').result(LIMIT_S)
        with pytest.raises(ft.BadInput, match="class 'other'; the site has fast, slow"):
            trainer(other={1: 1.0})(str(go)).result(LIMIT_S)
    assert ft.same_weights(result, alone)
    assert ft.same_weights(both, alone)
    journal = Journal(executor.ledger_path)
    class_of = {
        node: event.node_class
        for _, event in journal.events(ev.NodesJoined)
        if isinstance(event, ev.NodesJoined)
        for node in event.nodes
    }
    trainers = journal.history().runs[0].trainers
    nodes = [f.nodes for f in trainers['moved'].fragments]
    mixes = [f.nodes for f in trainers['both'].fragments]
    assert [class_of[node] for (node,) in nodes[:2]] == ['slow', 'fast']
    assert sorted(class_of[node] for node in mixes[-1]) == ['fast', 'slow']


def test_a_rescale_finds_the_next_ranks_ready_and_the_state_in_memory(tmp_path: Path) -> None:
    go, soon, later = (tmp_path / name for name in ('go', 'soon', 'later'))
    long = ft.freetrain_app(
        max_nodes=2,
        total_epochs=20,
        scaling=ft.Scaling(rate=SCALING, rescale_up_s=0.25),
        mode=ft.Reproducible(shards=2),
        checkpoints=ft.Checkpoints(every_s=3600.0),
    )(loads_first)
    short = ft.freetrain_app(
        max_nodes=1,
        total_epochs=20,
        scaling=ft.Scaling(rate=SCALING),
        mode=ft.Reproducible(shards=2),
    )(loads_first)
    with freetrain(tmp_path, ft.LocalSite(nodes=2, poll_s=0.2), horizon_s=60.0) as executor:
        before = short(str(soon), trainer_name='before')
        wait_until(lambda: before.progress().samples > 0, 'the first node is not used')
        first = long(str(go), trainer_name='long')

        def trains_on(nodes: int) -> Callable[[], bool]:
            samples: list[int] = []

            def look() -> bool:
                now = first.progress()
                samples.extend([now.samples] * (now.nodes == nodes))
                return len(samples) > 1 and now.samples > samples[0] and now.nodes == nodes

            return look

        wait_until(trains_on(1), 'it does not train on the second node')
        soon.touch()
        alone = before.result(LIMIT_S)
        wait_until(trains_on(2), 'it does not get the first node')
        behind = short(str(later), trainer_name='behind')
        wait_until(trains_on(1), 'it does not go on with one node')
        later.touch()
        behind.result(LIMIT_S)
        go.touch()
        result = first.result(LIMIT_S)
    assert ft.same_weights(result, alone)
    training = Journal(executor.ledger_path).history().runs[0].trainers[first.name]
    measured, history = training.rescaled, training.fragments
    assert [(m.before, m.after) for m in measured][:2] == [(1, 2), (2, 1)]
    assert all(m.seconds > 0 for m in measured)
    up_s, down_s = costs_bid(executor.ledger_path, 'long')
    assert up_s == 0.25  # as stated
    assert down_s == pytest.approx(measured[1].seconds)
    # It had rank 0 on the node that it began on. Which one stays goes by the nodes' names, which
    # are drawn: that one or the other.
    assert set(history[0].nodes) < set(history[1].nodes) > set(history[2].nodes)
    logs = tmp_path / 'checkpoints' / 'long' / 'logs'
    for fragment in history[1:3]:
        said = [log.read_text() for log in logs.glob(f'fragment-{fragment.number:06d}-rank-*.log')]
        assert len(said) == len(fragment.nodes)
        begun_with = fragment.started_samples
        assert all(f'the state in memory, with {begun_with} samples' in text for text in said)
        assert all(
            text.index('loaded') < text.index(f'fragment {fragment.number}: rank') for text in said
        ), said
    assert not list(logs.glob('ahead-of-*'))

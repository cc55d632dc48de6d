"""Streams: no sample is lost or repeated, and the bits are the same, for any ranks and cuts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from parsl_freetrain import BadInput, FragmentContext, same_weights
from parsl_freetrain.training.data.stream import NumberedStream
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import made, step
from tests.support.examples import refused_here
from tests.support.ranks import in_ranks

SIZE, TOTAL, BATCH = 22, 50, 8


class Stream(IterableDataset[Any]):
    """Numbers in an order of its own in each pass, augmented; may be cut to begin later."""

    def __init__(self, start: int = 0) -> None:
        self.start, self.epoch = start, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        shuffled = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch))
        for number in shuffled[self.start :].tolist():
            yield number, torch.full((2,), number / SIZE) + 0.1 * torch.randn(2)


class Seekable(Stream):
    def skip(self, n: int) -> Seekable:
        return Seekable(n)


class Divided(Stream):
    """Another one in each process."""

    def __iter__(self) -> Iterator[Any]:
        for number, x in super().__iter__():
            yield number, x + os.getpid()


def train(
    ctx: FragmentContext, stream: Any, seen: Path | None = None, stop_at: int | None = None
) -> None:
    model, optimizer = made(ctx)
    for number, x in ctx.loop(stream, BATCH):
        if ctx.samples == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if seen is not None:
            with seen.open('a') as file:
                file.writelines(f'{ctx.fragment} {ctx.samples} {n}\n' for n in number.tolist())
        step(model, optimizer, x)


def trained(seen: Path) -> list[int]:
    """The numbers but for those of a step that was only computed ahead."""
    rows = [tuple(map(int, line.split())) for line in seen.read_text().splitlines()]
    last = {samples: fragment for fragment, samples, _ in sorted(rows)}
    return sorted(n for fragment, samples, n in rows if last[samples] == fragment)


run = partial(in_ranks, total_samples=TOTAL)


@pytest.mark.parametrize(('stream', 'stop_at'), [(Stream(), 32), (Seekable(), 8)])
def test_a_stream_goes_on_where_it_stopped(
    fork_server: ForkClient, tmp_path: Path, stream: Any, stop_at: int
) -> None:
    one = tmp_path / 'one'
    (whole,) = run(fork_server, one, train, stream, one / 'seen')
    assert whole.how == 'finished', whole.error
    numbers = trained(one / 'seen')
    assert numbers[: 2 * 6] == [n for n in range(SIZE) for _ in range(numbers.count(n))][:12]
    assert len(numbers) == TOTAL and set(numbers) == set(range(SIZE))
    cut = tmp_path / 'cut'
    outcomes = run(fork_server, cut, train, stream, cut / 'seen', stop_at, world_size=3)
    assert {outcome.how for outcome in outcomes} == {'stopped'}, outcomes
    outcomes = run(fork_server, cut, train, stream, cut / 'seen', fragment=2, world_size=2)
    assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
    assert trained(cut / 'seen') == numbers
    assert same_weights(whole.path, outcomes[0].path)


def test_a_stream_of_other_samples_is_refused(fork_server: ForkClient, tmp_path: Path) -> None:
    (outcome,) = run(fork_server, tmp_path, train, Divided(), None, 16)
    assert outcome.how == 'stopped', outcome.error
    (outcome,) = run(fork_server, tmp_path, train, Divided(), fragment=2)
    assert 'is not the one that was read before' in outcome.error.message


def test_a_stream_goes_back_to_its_beginning_in_its_first_order() -> None:
    stream = NumberedStream(Stream(), seed=1)
    first = [number for number, _ in stream.__getitems__(range(TOTAL))]
    assert [number for number, _ in stream.__getitems__(range(TOTAL))] == first


class Counting(Stream):
    """Counts its passes by itself, so that it cannot go back."""

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield from super().__iter__()


def test_a_stream_that_cannot_go_back_is_refused() -> None:
    stream = NumberedStream(Counting(), seed=1)
    for number in range(0, SIZE, 2):
        stream.__getitems__([number, number + 1])
    with pytest.raises(BadInput, match='would be lost and others repeated'):
        stream.__getitems__([4])


def uses_workers(ctx: FragmentContext) -> None:
    made(ctx)
    ctx.loop(Stream(), BATCH, num_workers=2)


def test_streams_without_positions_are_refused(fork_server: ForkClient, tmp_path: Path) -> None:
    outcomes = run(fork_server, tmp_path / '1', train, Divided(), world_size=2)
    assert 'is not the same on all ranks' in outcomes[0].error.message
    said = refused_here(lambda ctx: train(ctx, Stream()), total_epochs=2)
    assert 'a stream, which has no epochs' in said
    assert 'leave out num_workers' in refused_here(uses_workers, total_samples=TOTAL)

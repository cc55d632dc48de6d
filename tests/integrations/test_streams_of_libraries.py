"""Streams of torchdata, datasets and WebDataset: the documentation's, killed and rescaled."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import equal, example, in_this_process
from tests.support.ranks import KILLED, order, ranks

TOTAL, SIZE = 120, 48


def trains(
    ctx: FragmentContext,
    function: Callable[..., None],
    files: list[str],
    seen: Path,
    dies_at: int | None = None,
) -> None:
    """Train, and note each sample's batch; at ``dies_at`` samples, with a checkpoint, die."""
    loop = ctx.loop

    def noting(*args: Any, **options: Any) -> Iterator[Any]:
        for batch in loop(*args, **options):
            if dies_at is not None and ctx.samples >= dies_at:
                last = ctx._run.checkpointer.settled()
                if last is not None and last.samples:
                    os.kill(os.getpid(), signal.SIGKILL)
            numbers = batch['number'] if isinstance(batch, dict) else batch[0]
            with seen.open('a') as file:
                file.writelines(f'{ctx.samples} {int(number)}\n' for number in numbers)
            yield batch

    ctx.loop = noting  # type: ignore[method-assign]
    function(ctx, files)


@pytest.mark.parametrize(
    ('name', 'library'),
    [
        pytest.param('stream_torchdata', 'torchdata', marks=pytest.mark.long),
        pytest.param('stream_hugging_face', 'datasets', marks=pytest.mark.long),
        ('stream_tar_files', 'webdataset'),
    ],
)
def test_no_sample_of_a_stream_is_lost_or_repeated(
    fork_server: ForkClient, tmp_path: Path, name: str, library: str
) -> None:
    pytest.importorskip(library, reason=f'needs {library}, as the extra test has it')
    script = example(name)
    files, function = script.generate(tmp_path), script.train.function
    try:
        whole = partial(trains, function=function, files=files, seen=tmp_path / 'whole')
        _, weights = in_this_process(whole, total_samples=TOTAL)
        given = (trains, function, files, tmp_path / 'cut')
        options: dict[str, Any] = {'total_samples': TOTAL, 'checkpoint_every_s': 0.01}
        first = order(tmp_path, **options)
        with ranks(fork_server, first, 1, tmp_path, *given, 64) as gang:
            assert gang.run() == [KILLED], gang.ranks[0].log.read_text()
        second = order(tmp_path, fragment=2, **options)
        with ranks(fork_server, second, 2, tmp_path, *given) as gang:
            outcomes = gang.run()
    finally:
        shutil.rmtree(Path.home() / '.cache' / 'huggingface', ignore_errors=True)
        with suppress(OSError):
            (Path.home() / '.cache').rmdir()
    assert [outcome.how for outcome in outcomes] == ['finished', 'finished'], outcomes
    assert equal(weights, load_weights(outcomes[0].path))
    once, cut = (
        [tuple(map(int, line.split())) for line in (tmp_path / seen).read_text().splitlines()]
        for seen in ('whole', 'cut')
    )
    numbers = [number for _, number in once]
    for begin in range(0, TOTAL, SIZE):  # each pass has every sample once
        assert len(set(numbers[begin : begin + SIZE])) == len(numbers[begin : begin + SIZE])
    # What was trained behind the last checkpoint before the kill was trained once more.
    assert set(cut) == set(once)
    assert len(once) == TOTAL

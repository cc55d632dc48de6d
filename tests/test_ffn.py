"""Flood-filling networks: what they see, find and learn, on any number of nodes."""

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parsl_freetrain import BadInput, FragmentContext, Scaled, load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import order, ranks
from workflows import ffn
from workflows.divided import DIVIDED, WHOLE
from workflows.ffn_flood import FOUND, flood, overlaps, segmented, segmented_by_brightness
from workflows.ffn_network import Examples, View, centres_in
from workflows.tubes import tubes

VIEW = View(extent=5, delta=2, moves=26)


def sees_all(image: Tensor, seed: Tensor) -> Tensor:
    """In place of a trained network: what is bright belongs to the object, at once."""
    return torch.where(image > 0.5, 4.0, -4.0) - seed


def bars() -> tuple[Tensor, Tensor]:
    """Two bars, 3 voxels thick, along the whole of a volume, and their numbers."""
    labels = torch.zeros(24, 14, 14, dtype=torch.uint8)
    labels[:, 2:5, 2:5] = 1
    labels[:, 9:12, 8:11] = 2
    return (labels > 0).float(), labels


def test_a_volume_that_is_too_small() -> None:
    with pytest.raises(BadInput, match='16x40x40 voxels; a field of view of 17 does not fit'):
        flood(sees_all, torch.zeros(16, 40, 40), (8, 8, 8), View(17, 4))
    small = torch.zeros(1, 24, 40, 40)
    with pytest.raises(BadInput, match='has 24x40x40 voxels; an example takes 25 along each axis'):
        Examples(small, small, [(0, 12, 12, 12)], View(17, 4))
    with pytest.raises(
        BadInput, match='No voxel of an object lies 4 voxels or more inside of the 1 volumes'
    ):
        centres_in(torch.zeros(1, 12, 12, 12), 5, VIEW, seed=1)


def test_one_object_is_filled_and_no_other() -> None:
    image, labels = bars()
    filled = flood(sees_all, image, (12, 3, 3), VIEW) >= FOUND
    assert torch.equal(filled, labels == 1)
    found = segmented(sees_all, image, VIEW)
    assert overlaps(found, labels.numpy()) == [1.0, 1.0] and found.max() == 2
    assert overlaps(segmented_by_brightness(image, labels.numpy()), labels.numpy())[0] > 0.3


TINY = replace(ffn.SMALL, view=View(7, 2, 6), channels=4, depth=2, examples=192, epochs=4, batch=8)


@pytest.fixture(scope='module')
def volumes(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[int, int, int, int]]]:
    """A folder with a volume to train on, and where to look in it."""
    folder = tmp_path_factory.mktemp('volumes')
    image, labels = tubes(24, 1, 3, seed=0, noise=0.5)
    np.save(folder / 'images.npy', image[None])
    np.save(folder / 'labels.npy', labels[None])
    return folder, centres_in(torch.from_numpy(labels)[None], 16, TINY.view, seed=1)


def train(
    ctx: FragmentContext,
    folder: str,
    centres: list[tuple[int, int, int, int]],
    threads: int,
    dies_at: int | None,
) -> None:
    """The workflow's training, on a node that is lost at a number of samples."""
    report = ctx.report

    def reporting(**metrics: float) -> None:
        report(**metrics)
        if ctx.is_main and dies_at is not None and ctx.samples >= dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(ctx, 'report', reporting)  # noqa: B010
    assert torch.get_num_threads() == threads
    ffn.train_ffn(ctx, folder, TINY, centres)


def trained(
    fork_server: ForkClient,
    folder: Path,
    volumes: tuple[Path, list[Any]],
    fragments: Sequence[tuple[int, int | None]],
    threads: int = 1,
    **how: Any,
) -> dict[str, Tensor]:
    """The weights after fragments on so many ranks, which die at these numbers of samples."""
    place, centres = volumes
    for number, (count, dies_at) in enumerate(fragments, 1):
        ordered = order(
            folder,
            number,
            trainer=folder.name,
            total_samples=64,
            threads=threads,
            checkpoint_every_s=0.01,
            **how,
        )
        with ranks(
            fork_server, ordered, count, folder, train, str(place), centres, threads, dies_at
        ) as gang:
            outcome = gang.run()[0]
        assert outcome.how == (None if dies_at else 'finished'), gang.ranks[0].log.read_text()
    return load_weights(outcome.path)


def test_any_cuts_and_any_nodes_give_the_same_network(
    fork_server: ForkClient, volumes: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """On two ranks until one is killed, on three likewise, then on one: bit for bit as one."""
    cut = trained(fork_server, tmp_path / 'cut', volumes, ((2, 24), (3, 40), (1, None)), threads=2)
    alone = trained(fork_server, tmp_path / 'alone', volumes, ((1, None),), threads=2)
    assert cut.keys() == alone.keys() and all(torch.equal(cut[key], alone[key]) for key in cut)
    curves = [json.loads((volumes[0] / f'{n}-losses.json').read_text()) for n in ('cut', 'alone')]
    assert curves[0] == curves[1] and len(curves[0]) == 4 and curves[0][-1][1] < curves[0][0][1]


def test_a_batch_that_grows_with_the_nodes(
    fork_server: ForkClient, volumes: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Ranks go to different numbers of places, and yet agree on the batch of two ranks."""
    scaled = Scaled(lr='sqrt', warmup_samples=32)
    weights = trained(
        fork_server, tmp_path / 'scaled', volumes, ((2, None),), mode='scaled', scaled=scaled
    )
    assert all(value.isfinite().all() for value in weights.values())
    curve = json.loads((volumes[0] / 'scaled-losses.json').read_text())
    assert len(curve) == 4 and curve[-1][1] < curve[0][1]


@pytest.mark.long
def test_through_kills_and_on_other_nodes(run_dir: Path) -> None:
    """As with ``--small``; the network finds tubes that it has not been trained on."""
    out = run_dir / 'out'
    assert ffn.main(['--small', '--out', str(out)]) == 0
    summary = json.loads((out / 'summary.json').read_text())
    told = summary[DIVIDED]
    assert told['preempted'] >= 2 and told['rescaled'] >= 1 and len(set(told['shapes'])) == 2
    assert summary[WHOLE]['preempted'] == 0
    assert all(trainer['samples'] == trainer['samples_expected'] for trainer in summary.values())
    found = json.loads((out / 'found.json').read_text())
    assert found['weights_equal'] is True
    assert found['losses'][DIVIDED] == found['losses'][WHOLE]
    assert np.mean(found['iou'][DIVIDED]) > max(0.8, np.mean(found['iou_by_brightness'])), found
    assert (out / 'ffn.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [(['--volume', '20', '--small'], 'room for .* tubes'), (['--out', '/proc/no'], 'be made')],
)
def test_bad_input_is_one_sentence(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert ffn.main(['--out', str(run_dir / 'out'), *arguments]) == 2
    [sentence] = capsys.readouterr().err.strip().splitlines()
    assert re.search(words, sentence), sentence

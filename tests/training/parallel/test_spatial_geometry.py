"""The positions of an axis in each part, and the exchange between parts."""

from itertools import pairwise

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn

from parsl_freetrain import BadInput
from parsl_freetrain.training.parallel.spatial import (
    AvgPool3d,
    Conv3d,
    ConvTranspose3d,
    Grid,
    MaxPool3d,
    Sharded,
    check_division,
)
from parsl_freetrain.training.parallel.spatial.geometry import (
    Bounds,
    TransposedWindow,
    Window,
    moves,
    placed,
    split,
)
from tests.support.properties import holds_for

WINDOWS = st.builds(
    Window, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2)
)
SPREADS = st.builds(
    TransposedWindow, st.integers(1, 4), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2)
)


def positions(reach: Window, bounds: Bounds, out: Bounds) -> list[list[int]]:
    """What each part has after the exchange, as positions; padding lies beyond the axis."""
    found = moves(reach, bounds, out, 'depth')
    made = []
    for part, move in enumerate(found):
        own = list(range(bounds[part], bounds[part + 1]))
        left = list(range(bounds[part - 1], bounds[part])) if part else []
        before = left[slice(*found[part - 1].send[1])] if part else []
        after = (
            list(range(bounds[part + 1], bounds[part + 2]))[slice(*found[part + 1].send[0])]
            if part + 1 < len(found)
            else []
        )
        assert (len(before), len(after)) == move.receive
        inside = before + own[slice(*move.keep)] + after
        need = range(*reach.need(out[part], out[part + 1]))
        made.append(
            [n for n in need if n < 0][: move.pad[0]]
            + inside
            + [n for n in need if n >= bounds[-1]][: move.pad[1]]
        )
    return made


@holds_for(
    st.one_of(WINDOWS, SPREADS), st.lists(st.integers(1, 9), min_size=1, max_size=5), tries=150
)
def test_every_part_has_what_its_output_needs(reach: Window, sizes: list[int]) -> None:
    bounds = (0, *(sum(sizes[: i + 1]) for i in range(len(sizes))))
    try:
        out = placed(reach, bounds, 'depth')
        made = positions(reach, bounds, out)
    except BadInput:
        assume(False)
    assert (
        out[0] == 0 and out[-1] == reach.extent(bounds[-1]) and all(a < b for a, b in pairwise(out))
    )
    assert made == [list(range(*reach.need(*part))) for part in pairwise(out)]


def test_parts_are_as_equal_as_can_be() -> None:
    assert split(17, 4, 'depth') == (0, 5, 9, 13, 17)
    said = 'The height of 3 cannot be divided into 4 parts: it can into up to 3'
    with pytest.raises(BadInput, match=said):
        split(3, 4, 'height')


def test_what_cannot_be_divided_is_one_sentence() -> None:
    for reach, bounds, words in (
        (
            Window(7, 1, 3),
            range(0, 9, 2),
            'needs 3 positions beyond part 0 of a depth of 8.*1 or 2',
        ),
        (Window(2, 2), range(7), 'makes 3 positions of a depth of 6 .*leaves a part without any:'),
        (Window(9), (0, 2, 4), 'makes 0 positions.*too small, undivided as well'),
    ):
        with pytest.raises(BadInput, match=words):
            moves(reach, tuple(bounds), placed(reach, tuple(bounds), 'depth'), 'depth')


class _Deep(nn.Module):
    """Three convolutions with a pool behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Conv3d(1 if i == 0 else 2, 2, 3, padding=1) for i in range(3)])

    def forward(self, x: Sharded) -> Sharded:
        for layer in self.layers:
            x = MaxPool3d(2)(layer(x))
        return x


def test_a_network_is_checked_before_anything_runs() -> None:
    check_division(_Deep(), 1, (32, 32, 32), (4, 2, 1))
    said = r'16x16x16 cannot be divided into 4x1x1 parts .* at the finest 2x1x1: .*window.*depth'
    with pytest.raises(BadInput, match=said):
        check_division(_Deep(), 1, (16, 16, 16), (4, 1, 1))
    with pytest.raises(BadInput, match='no division of them'):
        check_division(_Deep(), 1, (4, 4, 4), (2, 1, 1))


def test_options_that_are_not_there_are_refused() -> None:
    for make, words in (
        (lambda: Conv3d(1, 1, 3, padding='same'), "padding='same'.*as numbers"),
        (lambda: Conv3d(1, 1, 3, padding=1, padding_mode='circular'), "padding_mode='circular'"),
        (lambda: MaxPool3d(2, ceil_mode=True), 'no ceil_mode and no return_indices'),
        (lambda: AvgPool3d(2, count_include_pad=False), 'count_include_pad at True'),
    ):
        assert callable(make)
        with pytest.raises(BadInput, match=words):
            make()


def test_a_transposed_convolution_that_cannot_have_an_extent_says_so() -> None:
    small = Sharded.of(torch.zeros(1, 1, 3, 3, 3), (3, 3, 3), Grid())
    like = Sharded.of(torch.zeros(1, 1, 8, 6, 6), (8, 6, 6), Grid())
    with pytest.raises(BadInput, match='makes 6 to 7 positions of 3, and was asked for 8'):
        ConvTranspose3d(1, 1, 2, stride=2)(small, like=like)
    said = 'was given a part of 3x3x3 voxels; of 4x3x3 in 1x1x1 parts its own has 4x3x3'
    with pytest.raises(BadInput, match=said):
        Sharded.of(small.local, (4, 3, 3), Grid())

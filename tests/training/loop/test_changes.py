"""Every change of a plain container or array is noticed, wherever in it."""

from collections import Counter, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from parsl_freetrain import BadInput
from parsl_freetrain.training.loop.changes import is_large, is_library, mark, may_count
from parsl_freetrain.training.loop.packing import How, packed, unpacked


class Asks:
    def state_dict(self) -> dict[str, int]:
        return {'n': 1}

    def load_state_dict(self, _: Any) -> None:
        raise ValueError('begin first')


class Own:
    def __init__(self) -> None:
        self.scores, self.inner = [0] * 500, Counter[str]()


@dataclass(slots=True)
class Slots:
    log: list[int]


class Meter(dict[str, int]):
    pass


class Tables(UserDict[str, Any]):
    """As an xarray Dataset, which makes its arrays when it is asked for them."""

    __module__, __array__ = 'numpy', None

    def __getitem__(self, name: str) -> Any:
        self.last = self.data[name].view()
        return self.last


CHANGES: list[tuple[Any, Callable[[Any], object]]] = [
    ([-1] * 1000, lambda one: one.__setitem__(900, -2)),
    (set(range(1000)), lambda one: one.add(-5)),
    (deque([0] * 500, 500), lambda one: one.__setitem__(400, 1)),
    (dict.fromkeys(range(1000), 0), lambda one: one.__setitem__(900, 1)),
    (Counter(range(900)), lambda one: one.update([899])),
    (defaultdict(int, dict.fromkeys(range(900), 0)), lambda one: one.__setitem__(888, 3)),
    ({'a': {i: [0] * 100 for i in range(100)}}, lambda one: one['a'][77].__setitem__(80, 1)),
    (np.zeros(1000), lambda one: one.__setitem__(777, 1)),
    ([np.zeros(99) for _ in range(200)], lambda one: one[150].__setitem__(50, 1)),
    ([torch.zeros(1) for _ in range(200)], lambda one: one[150].add_(1)),
    (cycle([1, 2, 3]), next),
    (iter([1, 2]), next),
    ((i for i in range(3)), next),
    ([0] * 1_100_000, lambda one: one.__setitem__(777_777, 1)),
    ([object()] * 1_100_000, lambda one: one.__setitem__(777_777, 1)),
    (Slots([0]), lambda one: one.log.append(1)),
    (Meter(a=1), lambda one: one.__setitem__('a', 2)),
    ([Own(), 1.0], lambda one: one.__setitem__(1, 2.0)),
    (Own(), lambda one: one.inner.update(a=1)),
    (Own(), lambda one: one.scores.__setitem__(400, 2)),
    (Tables(a=np.zeros(4), b=np.zeros(4)), lambda one: one.data['b'].__setitem__(3, 1)),
]


def test_a_copy_in_place_of_a_copy_is_another_one() -> None:
    weights = torch.ones(4)
    best = weights.clone()
    before = mark([best]), mark(best)
    for _ in range(4):  # the third may have the id of the first
        best = weights.clone()
        assert (mark([best]), mark(best)) != before


@pytest.mark.parametrize(('one', 'change'), CHANGES)
def test_a_change_shows(one: Any, change: Callable[[Any], object]) -> None:
    before = mark(one)
    assert mark(one) == before
    change(one)
    assert mark(one) != before


def test_what_refers_to_itself_or_is_large() -> None:
    around: list[Any] = [1]
    around.append(around)
    mark(around)
    assert [is_large(one) for one in (around, [0] * 30_000, np.zeros(2**22))] == [False, True, True]


def test_libraries_of_all_environments_are_no_code_of_the_user() -> None:
    assert is_library(torch.__file__) and is_library(dataclass.__code__.co_filename)
    # A base environment below the own one, pip install --user, Debian, PYTHONPATH of Spack.
    for folder in ('/soft/conda/lib/python3.11/site-packages', '/usr/lib/python3/dist-packages'):
        assert is_library(f'{folder}/lightning/module.py')
    assert not is_library('/home/me/project/train.py') and not is_library(__file__)


HOW = How([], set(), lambda _: None, torch.device('cpu'))


def test_a_state_that_is_not_taken_back_is_a_sentence() -> None:
    with pytest.raises(BadInput, match=r'holds a Asks, .* \(ValueError: begin first\)'):
        unpacked(packed(Asks(), HOW), Asks(), HOW)


def test_what_a_state_has_beside_its_values_is_kept() -> None:
    """Without it, a nested TensorDict is not taken back."""
    state: Any = torch.nn.BatchNorm1d(2).state_dict()
    state._metadata['']['device'] = torch.device('cpu')
    again = unpacked(packed(state, HOW), None, HOW)
    assert again._metadata == state._metadata and again.keys() == state.keys()


def test_a_proxy_of_a_package_counts_nothing_itself() -> None:
    """As wandb's, whose ``__dict__`` is another object's; it ended a trainer with a TypeError."""
    own: Any = property(lambda self: MappingProxyType({'step': 1}))
    assert not may_count(type('Proxy', (), {'__module__': 'pytest', '__dict__': own})())
    plain: Any = type('Plain', (), {'__module__': 'pytest'})()
    plain.step = 1
    assert may_count(plain)

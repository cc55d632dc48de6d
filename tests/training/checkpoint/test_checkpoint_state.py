"""What is in a checkpoint comes back as it was, runs nothing, and fits or is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from parsl_freetrain import BadInput
from parsl_freetrain.training.checkpoint.flatten import put_together, take_apart
from parsl_freetrain.training.checkpoint.manifest import Damaged, Manifest, commit, write_manifest
from parsl_freetrain.training.checkpoint.parts import Contents
from parsl_freetrain.training.checkpoint.source import PartReader, read_state
from parsl_freetrain.training.checkpoint.state import Position, State, collect, content_of, restore
from parsl_freetrain.training.checkpoint.trainables import Prepared, sort_out
from parsl_freetrain.training.checkpoint.transport import Disk
from parsl_freetrain.training.checkpoint.trial import try_optimizers

TENSORS = {
    'f32': torch.randn(3, 4),
    'f64': torch.randn(5).double(),
    'bf16': torch.randn(7).bfloat16(),
    'f16': torch.randn(2, 2).half(),
    'fp8': torch.randn(3).to(torch.float8_e4m3fn),
    'bool': torch.tensor([True, False, True]),
    'u8': torch.arange(5, dtype=torch.uint8),
    'i64': torch.arange(6).reshape(2, 3),
    'complex': torch.randn(2, 2, dtype=torch.complex128),
    'c64': torch.randn(3, 2, dtype=torch.complex64),
    'conjugate': torch.randn(3, dtype=torch.complex64).conj(),
    'number': torch.tensor(3.5),
    'empty': torch.empty(0, 4),
    'transposed': torch.randn(3, 5).t(),
    'a view': torch.randn(10)[2:5],
    'parameter': nn.Parameter(torch.randn(2)),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if one.is_sparse:
            return other.is_sparse and same(one.to_dense(), other.to_dense())
        alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return alike and torch.equal(one.to(torch.complex128), other.to(torch.complex128))
    if isinstance(one, dict):
        alike = type(one) is type(other) and list(one) == list(other)
        return alike and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def round_trip(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    tensors, structure = take_apart(state, {})
    committed(folder, State(tensors, structure))
    reader = reader_of(folder)
    return put_together({name: reader.whole(name) for name in tensors}, reader.structure())


def committed(folder: Path, state: State) -> str:
    """A checkpoint with this state."""
    folder.mkdir(exist_ok=True)
    hashed = state.write(folder)
    write_manifest(folder, Manifest('t', 1, 1, {}), hashed)
    commit(folder)
    return str(folder)


def reader_of(folder: Path) -> PartReader:
    contents = Contents.read(folder)
    return PartReader(contents, Disk(folder, contents.files))


def test_tensors_of_all_kinds_come_back_to_the_bit(tmp_path: Path) -> None:
    loaded = round_trip(tmp_path / 'c', {'model': TENSORS})
    assert same(dict(loaded['model']), {name: tensor.detach() for name, tensor in TENSORS.items()})


def test_containers_and_keys_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        'optimizer': {
            'state': {0: {'step': torch.tensor(3.0), 'exp_avg': torch.randn(4)}, 1: {}},
            'param_groups': [{'lr': 0.1, 'betas': (0.9, 0.999), 'params': [0, 1], 'none': None}],
        },
        'scheduler': {'milestones': Counter({3: 1, 7: 2}), 'base_lrs': [0.1], 'last': {1, 2}},
        'a': {'b': torch.ones(1)},
        'a.b': torch.zeros(1),
        'model': OrderedDict(weight=torch.randn(2), extra=b'bytes'),
        'sparse': torch.eye(3).to_sparse(),
        'history': [torch.randn(2), [torch.randn(1), 3], (torch.randn(1),)],
        'dtype': torch.bfloat16,
    }
    assert same(round_trip(tmp_path / 'c', state), state)


def test_numbers_of_numpy_become_numbers_and_objects_are_refused() -> None:
    _, structure = take_apart(
        {'scheduler': {'best': np.float64(0.5), 'n': np.int64(3), 'f': np.float32(0.5)}}, {}
    )
    assert same(structure['rest'], {'scheduler': {'best': 0.5, 'n': 3, 'f': 0.5}})
    with pytest.raises(
        BadInput, match="the state of scheduler, entry 'f' has a function: keep it out of the state"
    ):
        take_apart({'scheduler': {'f': lambda: None}}, {'scheduler': 'the state of scheduler'})
    with pytest.raises(BadInput, match='has a set'):
        take_apart({'scheduler': {'s': {torch.ones(1)}}}, {})


def test_other_programs_can_read_the_tensors(tmp_path: Path) -> None:
    State({name: tensor.detach() for name, tensor in TENSORS.items()}, {}).write(tmp_path)
    found = load_file(tmp_path / 'rank-0.safetensors')
    assert found.keys() == TENSORS.keys()
    for name in TENSORS.keys() - {'fp8', 'complex', 'conjugate'}:
        assert torch.equal(found[name], TENSORS[name]), name


class TwoHalves(torch.Tensor):
    """Consists of plain tensors, as the 8-bit states of torchao."""

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor, scale: float) -> TwoHalves:
        made: TwoHalves = torch.Tensor._make_wrapper_subclass(cls, high.shape)
        made.high, made.low, made.scale = high, low, scale
        return made

    high: torch.Tensor
    low: torch.Tensor
    scale: float

    def __tensor_flatten__(self) -> tuple[list[str], list[float]]:
        return ['high', 'low'], [self.scale]

    @staticmethod
    def __tensor_unflatten__(parts: Any, how: list[float], size: Any, stride: Any) -> TwoHalves:
        assert tuple(size) == tuple(parts['high'].shape)
        return TwoHalves(parts['high'], parts['low'], *how)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def test_subclasses_and_named_code_come_back(tmp_path: Path) -> None:
    kept = TwoHalves(torch.randn(3).bfloat16(), torch.randn(3).bfloat16(), 0.5)
    state = {
        'optimizer': {'kept': kept},
        'model': {'made': {'act': nn.functional.gelu, 'k': nn.Tanh}},
    }
    loaded = round_trip(tmp_path / 'c', state)
    assert loaded['model'] == state['model']
    found = loaded['optimizer']['kept']
    assert type(found) is TwoHalves and found.scale == 0.5
    assert torch.equal(found.high, kept.high) and torch.equal(found.low, kept.low)
    with pytest.raises(BadInput, match='has a function: keep it out'):
        take_apart({'model': {'f': lambda: 0}}, {})
    tensors, structure = take_apart(state, {})
    structure['code'] = dict.fromkeys(structure['code'], 'torch.nn:Gone')
    with pytest.raises(BadInput, match='names Gone of torch.nn, which is not there'):
        put_together(tensors, structure)


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    attack = Attack(tmp_path / 'owned')
    folder = tmp_path / 'c'
    committed(folder, State({'x': torch.ones(2)}, attack))  # type: ignore[arg-type]
    with pytest.raises(Exception, match='[Ww]eights.only'):
        reader_of(folder).structure()
    assert not (tmp_path / 'owned').exists()


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    committed(tmp_path, State({'x': torch.ones(100)}, {}))
    reader = reader_of(tmp_path)
    with (tmp_path / 'rank-0.safetensors').open('r+b') as file:
        file.truncate(200)
    with pytest.raises(Damaged, match=r'rank-0\.safetensors is shorter than it was'):
        reader.whole('x')


def net(width: int = 4, **more: nn.Module) -> nn.Module:
    return nn.ModuleDict({**{f'layer{i}': nn.Linear(width, width) for i in range(4)}, **more})


def prepared(model: nn.Module, *more: Any, optimizer: Any = torch.optim.SGD) -> Prepared:
    return sort_out((model, optimizer(model.parameters(), lr=0.1), *more))


def written(folder: Path, things: Prepared) -> str:
    return committed(folder, collect(content_of(things), Position(10, 100, 0, 50, 10, 0)))


def refusal(now: Prepared, path: str) -> str:
    before = [tensor.clone() for tensor in now.tensors()]
    with pytest.raises(BadInput) as raised:
        restore(now, read_state(path))
    assert all(torch.equal(old, new) for old, new in zip(before, now.tensors(), strict=True))
    sentence = str(raised.value)
    assert path in sentence and 'another name or folder, to start anew' in sentence
    return sentence


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = written(tmp_path / 'c', prepared(net()))
    shapes = refusal(prepared(net(5)), path)
    assert 'layer0.weight has shape (4, 4) there and (5, 5) here' in shapes
    assert shapes.count('has shape') == 5 and 'and 3 more' in shapes
    assert 'head.weight is missing there; head.bias is missing there' in refusal(
        prepared(net(head=nn.Linear(1, 1))), path
    )
    smaller = nn.ModuleDict({f'layer{i}': nn.Linear(4, 4) for i in range(3)})
    assert 'layer3.weight is unknown here; layer3.bias is unknown here' in refusal(
        prepared(smaller), path
    )


def test_other_optimizers_schedulers_and_scalers_are_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler('cpu')
    step = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    things = sort_out((model, optimizer, step, scaler))
    path = written(tmp_path / 'c', things)
    restore(things, read_state(path))
    assert 'holds 1 schedulers and ctx.prepare was given 0' in refusal(prepared(net()), path)
    adam = torch.optim.Adam(model.parameters())
    step = torch.optim.lr_scheduler.StepLR(adam, 3)
    said = refusal(sort_out((model, adam, step, scaler)), path)
    assert 'The optimizer in checkpoint' in said
    assert 'was of class SGD and ctx.prepare was given Adam' in said
    assert 'holds 1 scalers and ctx.prepare was given 0' in refusal(
        Prepared(things.models, things.optimizers, things.schedulers), path
    )
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    assert 'was of class StepLR and ctx.prepare was given CosineAnnealingLR' in refusal(
        sort_out((model, optimizer, cosine, scaler)), path
    )


class Counting(torch.optim.SGD):
    """Its steps grow with a number that is only in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group['lr'] = 0.1 * self.count
        return super().step(closure)


class Queued(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]['params'][0]]['queue'] = deque([1])
        return super().step(closure)


class Unloadable(torch.optim.SGD):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError('slow_weights')


class Holding(Counting):
    """It keeps its number in its state, and another optimizer that steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.Adam(self.param_groups[0]['params'])

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), 'count': self.count, 'inner': self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.count = state['count']
        self.inner.load_state_dict(state['inner'])
        super().load_state_dict({k: state[k] for k in ('state', 'param_groups')})


class Renamed(Holding):
    """It has no 'state', as a Lookahead that wraps another one."""

    def state_dict(self) -> Any:
        own = super().state_dict()
        return {'fast': own.pop('state'), **own}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({'state': state['fast'], **state})


class Sharp(Counting):
    """It passes twice (SAM); of the optimizer that steps, its own state has nothing."""

    count = -1

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.count += type(self).count >= 0
        self.param_groups[0]['lr'] *= 0.9 + self.count
        closure()
        return self.base.step()


class SharpCounting(Sharp):
    count = 0


@pytest.mark.parametrize(
    ('kind', 'refused'),
    [
        (Sharp, ''),
        (SharpCounting, 'SharpCounting does not go on as before from its own state_dict'),
        (Counting, 'Counting does not go on as before from its own state_dict'),
        (Queued, 'Queued cannot be saved and loaded again .* has a deque'),
        (Unloadable, "Unloadable cannot be saved and loaded again .*'slow_weights'"),
        (Holding, ''),
        (Renamed, ''),
    ],
)
def test_optimizer_that_cannot_go_on_is_refused_before_it_trains(kind: Any, refused: str) -> None:
    model, called = nn.Sequential(nn.Linear(200, 3), nn.Conv1d(3, 3, 3)), list[Any]()
    optimizer = kind(model.parameters())
    optimizer.register_step_pre_hook(lambda *how: called.append(how))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # its wrapper of step is the optimizer's own
    weights, numbers = [p.clone() for p in model.parameters()], torch.get_rng_state()
    with pytest.raises(BadInput, match=refused) if refused else nullcontext():
        try_optimizers(sort_out((model, optimizer)))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not called
    assert not optimizer.state
    assert all(map(torch.equal, weights, model.parameters()))

"""Outer steps: torch's SGD on the mean change, from files, tensor by tensor. Transports between
sites, and what pieces hand in through them.
"""

import json
import pickle
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from msgspec import structs
from torch import nn

from parsl_freetrain import (
    BadInput,
    Checkpoint,
    DiLoCo,
    Folder,
    FreeTrainError,
    Nesterov,
    ProxyStoreTransport,
)
from parsl_freetrain.training.checkpoint import block_digests, handed_in
from parsl_freetrain.training.checkpoint import outer as steps
from parsl_freetrain.training.checkpoint import outer_means as om
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.state import Position, State, collect, content_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import Prepared, sort_out
from tests.support.ranks import order

LENGTH = 10  # samples of a round


def connector(name: str, folder: Path) -> Any:
    pytest.importorskip('proxystore', reason='needs the extra proxystore')
    from proxystore.connectors import file, local
    from proxystore.store import Store

    made: Any = file.FileConnector(str(folder)) if name == 'file' else local.LocalConnector()
    return ProxyStoreTransport(Store(f'exchange-{name}', made))


TRANSPORTS: dict[str, Callable[[Path], Any]] = {
    'folder': lambda folder: Folder(str(folder)),
    'proxystore, files': lambda folder: connector('file', folder),
    'proxystore, memory': lambda folder: connector('local', folder),
}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return TRANSPORTS[request.param](tmp_path / 'exchange')


def test_what_all_transports_do(transport: Any) -> None:
    keys = [transport.put('a-1', b'one'), transport.put('a-1', b'one'), transport.put('a-2', b'')]
    sent = msgspec.convert(msgspec.to_builtins(transport), type(transport))  # as nodes have it
    assert [sent.get(key) for key in keys] == [b'one', b'one', b'']
    other = transport.put('a-3', bytes(2**20))
    for key in (*keys, *keys):
        sent.remove(key)
    for key in keys:
        with pytest.raises(LookupError):
            transport.get(key)
    assert sent.get(other) == bytes(2**20)


class Anything(NamedTuple):
    held: Any


def test_keys_are_names_and_fields_of_the_connector_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = connector('file', tmp_path / 'exchange')
    key = transport.put('a', b'one')
    assert json.loads(key)[0] == 'FileKey'
    for wrong in (pickle.dumps(transport._key(key)).hex(), '', '["FileKey"]', '["FileKey", [5]]',
                  '["FileKey", ["a", "b"]]', '["LocalKey", ["a"]]', key[:-1]):  # fmt: skip
        for use in (transport.get, transport.remove):
            with pytest.raises(BadInput, match=r'is none of its keys.*put the checkpoint back'):
                use(wrong)

    def put(self: Any, content: bytes) -> Any:
        return Anything(Anything(1))

    monkeypatch.setattr(type(transport._connector()), 'put', put)
    for kind, sentence in ((Any, 'annotated with a NamedTuple'), (Anything, 'not the same after')):
        put.__annotations__['return'] = kind
        with pytest.raises(BadInput, match=sentence):
            transport.put('a', b'one')


def piece(folder: Path, transport: Any, compress: Any, seed: int) -> tuple[str, om.End]:
    """What a piece hands in, and what it has committed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 4096), torch.nn.BatchNorm1d(7))
    trained = [p for p in model.parameters() if p.requires_grad]
    prepared = sort_out((model, torch.optim.SGD(trained, lr=0.1)))
    diloco: Any = DiLoCo(replicas=2, steps=2, compress=compress, transport=transport)
    ordered = order(folder)
    ordered = replace(ordered, spec=structs.replace(ordered.spec, diloco=diloco))
    begun = steps.OuterWeights(Path(ordered.store), 'digits', 0).begin(prepared)
    with torch.no_grad():
        for p in trained:
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)), alpha=1e-3)
    where: Any = {'round_from': begun, 'weights': dict(steps.weights_of(prepared))}
    position = Position(LENGTH, 100, 0, 50, 8, 1, round_ended=1, **where)
    state: State = collect(content_of(prepared), position)
    store = PosixCheckpointStore(Path(ordered.store), 'digits')
    end = store.save(
        state.write,
        samples=LENGTH,
        fragment=1,
        metrics={'loss': float('nan')},
        hand_in=lambda: handed_in.hand_in(ordered, state, {'loss': float('nan')}),
    )
    assert store.handed_in() == {LENGTH: end.handed_in}
    return end.handed_in, om.End.of(end)


@pytest.mark.parametrize(('compress', 'size'), [(None, 4.0), ('bfloat16', 2.0), ('int8', 1.02)])
def test_what_is_handed_in_makes_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Any, size: float
) -> None:
    """``size``: bytes of a number. There are several blocks."""
    for module in (block_digests, handed_in):
        monkeypatch.setattr(module, 'BLOCK', 2**20)
    transport = Folder(str(tmp_path / 'exchange'))
    pieces = [piece(tmp_path / str(k), transport, compress, k) for k in (1, 2)]
    elsewhere: list[om.End] = [handed_in.EndElsewhere(transport, told) for told, _ in pieces]
    digests = []
    for k, ends in ((1, [end for _, end in pieces]), (2, elsewhere)):
        weights = steps.OuterWeights(tmp_path / str(k) / 'store', 'digits', 0)
        weights.step(ends, LENGTH, Nesterov(), LENGTH, None, compress)
        path = weights.find(LENGTH)
        assert path is not None
        digests.append(steps.digest_of(path))
    assert digests[0] == digests[1]
    stored = sum(file.stat().st_size for file in (tmp_path / 'exchange').iterdir())
    assert stored < 2 * 1.01 * size * 301 * 4096
    for told, _ in pieces:
        handed_in.forget(transport, told)
        handed_in.forget(transport, told)  # it only says that it cannot
    assert not [*(tmp_path / 'exchange').iterdir()]


def test_what_others_have_altered_or_removed_is_not_used(tmp_path: Path) -> None:
    exchange = tmp_path / 'exchange'
    transport = Folder(str(exchange))
    told, _ = piece(tmp_path, transport, 'int8', 1)
    listed, *_ = exchange.glob('*-list-*')
    block, *_ = exchange.glob(f'*-{LENGTH}-0-*')

    def read() -> None:
        handed_in.EndElsewhere(transport, told).change('model.0.bias', torch.zeros(4096), 'int8')

    for file, sentence in ((block, 'is not what it was'), (listed, 'is not what it was')):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + b'\x55')
        with pytest.raises(FreeTrainError, match=sentence):
            read()
        file.write_bytes(content)
    block.unlink()
    with pytest.raises(FreeTrainError, match='is gone: put it back'):
        read()


def test_a_transport_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handed_in, '_PAUSES_S', (0.05, 0.1, 0.2, 0.4, 0.8, 1.6))
    (tmp_path / 'exchange').write_text('in the way')
    transport = Folder(str(tmp_path / 'exchange'))
    with pytest.raises(FreeTrainError, match=r'bytes cannot be handed in to Folder\(.*FileExists'):
        piece(tmp_path / '1', transport, None, 1)
    timer = threading.Timer(0.2, (tmp_path / 'exchange').unlink)
    timer.start()
    assert piece(tmp_path / '2', transport, None, 1)[0]
    timer.join()


def test_what_is_no_transport_is_refused() -> None:
    bad: Callable[[str], Any] = lambda value: value  # noqa: E731
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: DiLoCo(compress=bad('fp8')), "compress is 'fp8'; it must be 'bfloat16' or 'int8'"),
        (
            lambda: DiLoCo(transport=bad('/exchange')),
            "transport is '/exchange'; it must be a Folder or",
        ),
        (lambda: Folder('exchange'), "path is 'exchange'; it must be an absolute"),
        (lambda: Folder(''), "path is ''; it must be an absolute"),
        (lambda: Folder('$NOWHERE/a').put('a', b''), "'.NOWHERE/a'; it .* variables are set"),
        (lambda: ProxyStoreTransport('redis'), "is 'redis'; it must be a proxystore.store.Store"),
    ]
    for make, sentence in wrong:
        with pytest.raises(BadInput, match=sentence):
            make()


def made(seed: int = 0, dtype: torch.dtype = torch.float32) -> Prepared:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(2, 2))
    model[2].weight = nn.Parameter(model[0].weight.T.contiguous())
    model.tied = model[0].weight
    model[3].requires_grad_(False)
    model = model.to(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    return sort_out((model, torch.optim.AdamW(trained, lr=0.01)))


def save(folder: Path, prepared: Prepared, replica: int, rounds: int, late: int = 0) -> Checkpoint:
    weights = dict(steps.weights_of(prepared))
    samples = rounds * LENGTH
    before = steps.OuterWeights(folder, 'gpt', 0).find(max(samples - LENGTH - late, 0))
    assert before is not None
    where: Any = {'round_from': steps.digest_of(before), 'weights': weights}
    position = Position(samples, 100, 0, 50, 5, 1, round_ended=rounds, **where)
    state = collect(content_of(prepared), position)
    store = PosixCheckpointStore(folder / str(replica), f'r{replica}')
    how = {'loss': replica + 0.5, 'skipped_steps': 1.0}
    return store.save(state.write, samples=samples, fragment=1, metrics=how)


@torch.no_grad()
def trained(prepared: Prepared, replica: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(10 * rounds + replica)
    model: Any = prepared.models[0]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model[1].running_mean.fill_(replica)
    model[1].num_batches_tracked.fill_(rounds)


@pytest.mark.parametrize(
    ('outer', 'dtype', 'late'),
    [
        (Nesterov(lr=0.7, momentum=0.9), torch.float32, 0),
        (Nesterov(lr=0.7, momentum=0.9), torch.float64, LENGTH),
        (Nesterov(momentum=0.0), torch.bfloat16, 0),
        (None, torch.float32, LENGTH),
    ],
)
def test_an_outer_step_is_that_of_torch_and_the_rest_is_averaged(
    tmp_path: Path, outer: Nesterov | None, dtype: torch.dtype, late: int
) -> None:
    """``late``: with the changes of a round that began without the last outer step."""
    replicas = [made(dtype=dtype) for _ in range(3)]
    expected = [p.detach().to(torch.promote_types(dtype, torch.float32)).clone().requires_grad_()
                for p in replicas[0].models[0].parameters() if p.requires_grad]  # fmt: skip
    sgd = torch.optim.SGD(expected, lr=outer.lr, momentum=outer.momentum,
                          nesterov=outer.momentum > 0) if outer else None  # fmt: skip
    weights = steps.OuterWeights(tmp_path, 'gpt', 0)
    for prepared in replicas:
        weights.begin(prepared)
    started = [[one.detach().clone() for one in expected]]
    for rounds in (1, 2, 3):
        ends = []
        for replica, prepared in enumerate(replicas):
            trained(prepared, replica, rounds)
            ends.append(save(tmp_path, prepared, replica, rounds, late))
        begun = max((rounds - 1) * LENGTH - late, 0)
        weights.step([*map(om.End.of, ends)], rounds * LENGTH, outer, LENGTH, begun)
        path = weights.find(rounds * LENGTH)
        assert path is not None
        every = [[p for p in one.models[0].parameters() if p.requires_grad] for one in replicas]
        for held, before, *those in zip(expected, started[begun // LENGTH], *every, strict=True):
            mean = torch.stack([one.detach().to(held.dtype) for one in those]).mean(0)
            held.grad = before - mean
            if sgd is None:
                held.data = held.detach() - held.grad
        if sgd is not None:
            sgd.step()
        started.append([one.detach().clone() for one in expected])
        for prepared, end in zip(replicas, ends, strict=True):
            saved, metrics = steps.with_weights(read_state(end.path), path)
            assert metrics == {'loss': 1.5, 'skipped_steps': 3.0}
            prepared.models[0].load_state_dict(saved.models[0])
            held = [p for p in prepared.models[0].parameters() if p.requires_grad]
            for one, other in zip(held, expected, strict=True):
                torch.testing.assert_close(one.detach(), other.detach().to(dtype))
            model: Any = prepared.models[0]
            norm, same = model[1], vars(made(dtype=dtype))['models'][0][3]
            assert norm.running_mean.tolist() == [1.0] * 4
            assert norm.num_batches_tracked == rounds
            assert torch.equal(model[3].weight, same.weight)
            last = weights.find(rounds * LENGTH - late)
            assert last is not None
            saved, _ = steps.with_weights(read_state(end.path), last)
            model.load_state_dict(saved.models[0])
    assert weights.find(LENGTH) is None and weights.find(2 * LENGTH) is not None


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(('how', 'error'), [('bfloat16', 2**-8), ('int8', 2**-7)])
def test_a_change_is_rounded_and_what_is_not_finite_is_never_a_number(
    how: str, error: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((), (0, 3), (5, 7), (300, 3)):
        change = torch.randn(shape, generator=generator, dtype=om.precise(dtype)) * 1e-3
        content = om.compressed(change, how)
        assert content.numel() == om.compressed_size(change.dtype, shape, how)
        again = om.decompressed(content, how, change)
        assert (again.dtype, again.shape) == (change.dtype, change.shape)
        if change.numel():
            assert (again - change).abs().max() <= error * change.abs().max()
        assert torch.equal(om.decompressed(om.compressed(0 * change, how), how, change), 0 * change)
    for wrong in (torch.nan, torch.inf):
        change.view(-1)[3] = wrong
        assert not om.decompressed(om.compressed(change, how), how, change).view(-1)[3].isfinite()


def two_ends(folder: Path) -> Sequence[Checkpoint]:
    ends = []
    for replica in (0, 1):
        prepared = made()
        steps.OuterWeights(folder, 'gpt', replica).begin(prepared)
        trained(prepared, replica, 1)
        ends.append(save(folder, prepared, replica, 1))
    return ends


def test_of_several_at_once_the_first_counts_and_all_have_the_same_bytes(tmp_path: Path) -> None:
    ends = [*map(om.End.of, two_ends(tmp_path))]
    together = threading.Barrier(3)

    def step(replica: int) -> None:
        weights = steps.OuterWeights(tmp_path, 'gpt', replica)
        together.wait()
        weights.step(ends, LENGTH, Nesterov(), LENGTH)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(step, range(3))] == [None] * 3
    assert len([*(tmp_path / 'outer').glob(f'*{LENGTH:06d}-f*')]) == 1
    assert not [*(tmp_path / 'outer' / 'drafts').iterdir()]


def test_who_begins_while_another_one_does_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come between two looks of the second one."""
    first, second = (steps.OuterWeights(tmp_path, 'gpt', replica) for replica in (0, 1))
    monkeypatch.setattr(second, 'find', lambda _: print(first.begin(made())))
    assert second.begin(made()) == first.begin(made())


def test_what_is_not_the_same_is_noticed(tmp_path: Path) -> None:
    committed = two_ends(tmp_path)
    ends = [*map(om.End.of, committed)]
    weights = steps.OuterWeights(tmp_path, 'gpt', 1)
    with pytest.raises(BadInput, match="Replica 1 begins with another 'model"):
        weights.begin(made(seed=1))
    other = replace(Position(10, 100, 0, 50, 5, 1), round_ended=1, round_from='another')
    foreign = PosixCheckpointStore(tmp_path / 'foreign', 'r1').save(
        collect(content_of(made()), other).write, samples=10, fragment=1, metrics={}
    )
    with pytest.raises(FreeTrainError, match='Replica 1 has trained from other weights than'):
        weights.step([ends[0], om.End.of(foreign)], LENGTH, Nesterov(), LENGTH)
    with pytest.raises(FreeTrainError, match='Replica 1 has trained from other weights than'):
        weights.check(0, 'another')
    weights.step(ends, LENGTH, Nesterov(), LENGTH)
    with pytest.raises(FreeTrainError, match='and those made here, differ'):
        weights.step(ends, LENGTH, Nesterov(lr=0.1), LENGTH)
    steps.OuterWeights(tmp_path, 'gpt', 0, exact=False).step(ends, LENGTH, Nesterov(lr=0.1), LENGTH)
    damage(next(Path(committed[1].path).glob('*.safetensors')))
    with pytest.raises(om.EndDamaged) as raised:
        weights.step([*map(om.End.of, committed)], LENGTH, None, LENGTH)
    assert raised.value.path == Path(committed[1].path)
    damage(next((tmp_path / 'outer').glob(f'ckpt-{0:012d}-*/*.safetensors')))
    with pytest.raises(FreeTrainError, match='put them back'):
        weights.step(ends[:1], LENGTH, Nesterov(), LENGTH)
    shutil.rmtree(next((tmp_path / 'outer').glob(f'ckpt-{0:012d}-*')))
    with pytest.raises(FreeTrainError, match='Replica 1 has no checkpoint any more'):
        weights.begin(made())


def damage(data: Path) -> None:
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)

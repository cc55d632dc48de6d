"""Transports between sites, and what pieces hand in through them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from parsl_freetrain import BadInput, DiLoCo, Folder, FreeTrainError, Nesterov, ProxyStoreTransport
from parsl_freetrain.training.checkpoint import handed_in
from parsl_freetrain.training.checkpoint import outer as steps
from parsl_freetrain.training.checkpoint.outer_means import End
from parsl_freetrain.training.checkpoint.state import Position, State, collect, content_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import sort_out
from tests.support.ranks import order

LENGTH = 16  # samples of a round


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


def piece(
    folder: Path, transport: Any, compress: Any, seed: int, wide: int = 300
) -> tuple[str, End]:
    """What a piece hands in, and what it has committed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(wide, 4096), torch.nn.BatchNorm1d(7))
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
    return end.handed_in, End.of(end)


@pytest.mark.parametrize(
    ('compress', 'wide', 'size'), [(None, 4300, 4.0), ('bfloat16', 300, 2.0), ('int8', 300, 1.02)]
)
def test_what_is_handed_in_makes_the_same_weights(
    tmp_path: Path, compress: Any, wide: int, size: float
) -> None:
    """``size``: bytes of a number. What is wide has several blocks."""
    transport = Folder(str(tmp_path / 'exchange'))
    pieces = [piece(tmp_path / str(k), transport, compress, k, wide) for k in (1, 2)]
    elsewhere: list[End] = [handed_in.EndElsewhere(transport, told) for told, _ in pieces]
    digests = []
    for k, ends in ((1, [end for _, end in pieces]), (2, elsewhere)):
        weights = steps.OuterWeights(tmp_path / str(k) / 'store', 'digits', 0)
        weights.step(ends, LENGTH, Nesterov(), LENGTH, None, compress)
        path = weights.find(LENGTH)
        assert path is not None
        digests.append(steps.digest_of(path))
    assert digests[0] == digests[1]
    stored = sum(file.stat().st_size for file in (tmp_path / 'exchange').iterdir())
    assert stored < 2 * 1.01 * size * (wide + 1) * 4096
    for told, _ in pieces:
        handed_in.forget(transport, told)
        handed_in.forget(transport, told)  # it only says that it cannot
    assert not [*(tmp_path / 'exchange').iterdir()]


def test_what_others_have_altered_or_removed_is_not_used(tmp_path: Path) -> None:
    exchange = tmp_path / 'exchange'
    transport = Folder(str(exchange))
    told, _ = piece(tmp_path, transport, 'int8', 1)
    listed, *_ = exchange.glob('*-list-*')
    block, *_ = exchange.glob('*-16-0-*')

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
        (lambda: Folder('exchange').put('a', b''), "path is 'exchange'; it must be an absolute"),
        (lambda: ProxyStoreTransport('redis'), "is 'redis'; it must be a proxystore.store.Store"),
    ]
    for make, sentence in wrong:
        with pytest.raises(BadInput, match=sentence):
            make()

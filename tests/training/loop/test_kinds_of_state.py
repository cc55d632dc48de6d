"""What a training consists of besides models: trained as in plain PyTorch, or refused."""

import copy
import os
import random
import signal
import time
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from enum import Enum
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import Dataset, TensorDataset, default_collate

from parsl_freetrain import FragmentContext, Throughput, load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import refused, trained
from tests.support.examples import in_this_process, refused_here
from tests.support.ranks import order, ranks

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X[:, :1] * 3)
TOTAL, CUT = 64, 24  # four epochs; within the second


class Net(nn.Module):
    """A model with two methods, and buffers of several kinds."""

    scale: torch.Tensor
    mask: torch.Tensor
    graph: torch.Tensor
    cache: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer('scale', torch.ones(()), persistent=False)
        self.register_buffer('cache', None, persistent=False)
        self.register_buffer('mask', torch.ones(1, 1).expand(1, 4), persistent=False)
        self.register_buffer('graph', torch.eye(4).to_sparse_coo())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = x.new_ones(len(x), 1)
        spread = torch.sparse.mm(self.graph, x.T).T * self.mask
        found: torch.Tensor = self.dropout(torch.tanh(self.body(spread)))
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale.mul_(0.9).add_(0.2)  # the same for all samples
        found: torch.Tensor = self.head(self.encode(x / self.scale)) * self.cache
        return found


def sgd(*modules: nn.Module, lr: float = 0.05, **options: Any) -> torch.optim.SGD:
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, **options)


def fit(
    ctx: FragmentContext, loss_of: Callable[[Any, Any], Any], *optimizers: Any, **looped: Any
) -> None:
    for x, y in ctx.loop(DATA, 4, **looped):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
        cut(ctx)


def cut(ctx: FragmentContext) -> None:
    """The first fragment gets its notice. Of quick steps, ranks would agree on the end too late."""
    if ctx.trainer == 'cut' and ctx.fragment == 1:
        time.sleep(0.1)
        if ctx.rank == 0 and ctx.samples >= CUT:
            os.kill(os.getpid(), signal.SIGTERM)


def line(ctx: FragmentContext, lr: float = 0.05) -> Any:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    model.register_buffer('offset', torch.zeros(1), persistent=False)
    return ctx.prepare(model, sgd(model, lr=lr))


class ActNorm(nn.Module):
    """Makes its numbers of the first batch, and remembers that outside of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.ready = nn.Parameter(torch.zeros(4)), False

    def forward(self, x: torch.Tensor) -> Any:
        if not self.ready:
            self.shift.data.copy_(x.mean(0) + torch.rand(4))
            self.ready = True
        return x - self.shift


def first_pass(ctx: FragmentContext, warm: bool = True) -> None:
    model: Any = nn.Sequential(ActNorm(), nn.LazyLinear(1))
    if warm:
        ctx.warm_up(lambda: model(X[:4] + ctx.rank))  # that of rank 0 counts
    else:
        model[1](X[:4])
    model, optimizer = ctx.prepare(model, sgd(model, lr=0.01))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def first_pass_in_the_body(ctx: FragmentContext) -> None:
    first_pass(ctx, warm=False)


def parameter_of_no_model(ctx: FragmentContext) -> list[float]:
    weight, log_var = torch.ones(4, 1, requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([weight, log_var], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
    optimizer, plateau = ctx.prepare(optimizer, plateau)
    for epoch in ctx.epochs():
        fit(ctx, lambda x, y: (-log_var).exp() * F.mse_loss(x @ weight, y) + log_var, optimizer)
        plateau.step(float(weight.detach().sum()), epoch)
    return [round(log_var.item(), 5), round(optimizer.param_groups[0]['lr'], 8)]


def trained_by_hand(ctx: FragmentContext) -> None:
    (model, optimizer), known = line(ctx), {'scale': torch.ones(1, requires_grad=True)}
    fit(ctx, lambda x, y: (model(x) * known['scale'].data.sub_(0.1) - y).square().mean(), optimizer)


def optimizers_that_share(ctx: FragmentContext) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({'body': nn.Linear(4, 4), 'a': nn.Linear(4, 1), 'b': nn.Linear(4, 1)})
    first, second = sgd(model['body'], model['a']), sgd(model['body'], model['b'], lr=0.001)
    model, first, second = ctx.prepare(model, first, second, clip_grad_norm=1.0)
    for x, y in ctx.loop(DATA, 4):
        hidden = model['body'](x)
        first.zero_grad()
        F.mse_loss(model['a'](hidden), y).backward(retain_graph=True)
        first.step()
        second.zero_grad()
        F.mse_loss(model['b'](hidden), -y).backward()
        second.step()
        cut(ctx)


def group_added_later(ctx: FragmentContext) -> None:
    model = Net()
    model.body.requires_grad_(False)
    body = model.body
    model, optimizer = ctx.prepare(model, sgd(model))

    def unfreeze() -> None:
        if ctx.epoch == 0:
            body.requires_grad_(True)
            optimizer.add_param_group({'params': list(body.parameters()), 'lr': 0.02})

    ctx.each_epoch(unfreeze)
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)
    assert len(optimizer.param_groups) == 2


def settings_by_epoch(ctx: FragmentContext) -> list[float]:
    model = Net()
    body, dropout, criterion = model.body, model.dropout, nn.HuberLoss()  # not prepared
    model, optimizer = ctx.prepare(model, sgd(model))
    for epoch in ctx.epochs():
        if epoch == 1:
            body.bias.requires_grad_(False)
        fit(ctx, lambda x, y: criterion(model(x), y), optimizer)
        criterion.delta *= 0.9
        if epoch == 0:
            dropout.p = 0.25 if ctx.spec.shards else 0.0
            body.eval()
    return [dropout.p, body.training, body.bias.requires_grad, criterion.delta]


def set_at_each_epoch(ctx: FragmentContext) -> list[float]:
    """A setting of a module, and an attribute, made anew for each epoch; cut at an epoch's end."""
    torch.manual_seed(1)
    model, scores = Counting(), Namespace(all=[], mean=0.0)
    raw, (model, optimizer) = model, ctx.prepare(model, sgd(model, lr=0.002))
    for epoch in ctx.epochs():
        raw.calls, scores.all = 1.0 + epoch, []
        for i, (x, y) in enumerate(ctx.loop(DATA, 4)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).mul(1 + i).backward()
            optimizer.step()
            scores.all.append(epoch)
            if ctx.samples >= 28:
                cut(ctx)
        scores.mean += sum(scores.all) / len(scores.all)
    return [raw.calls, scores.mean]


def changed_before_each_epoch(ctx: FragmentContext) -> float:
    """As by adjust_learning_rate(optimizer, epoch); the next fragment does it once more."""
    model, optimizer = line(ctx)
    for _ in ctx.epochs():
        optimizer.param_groups[0]['lr'] *= 0.8
        nn.init.normal_(model.bias)
        fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)
    return float(optimizer.param_groups[0]['lr'])


def set_before_the_loop(ctx: FragmentContext) -> None:
    model, optimizer = ctx.prepare(net := Net(), sgd(net))
    torch.manual_seed(2)
    pretrained = nn.Linear(4, 4).state_dict()
    state = model.state_dict()
    model.load_state_dict({**state, **{f'body.{name}': one for name, one in pretrained.items()}})
    optimizer.param_groups[0]['lr'] = 0.05
    ctx.each_epoch(lambda: optimizer.param_groups[0].update(lr=0.01))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def momentum_begins_anew(ctx: FragmentContext, in_place: bool = False) -> None:
    model, optimizer = ctx.prepare(net := Net(), sgd(net))
    model.head.weight.data.mul_(2.0)
    for its in optimizer.state.values() if in_place else ():
        its['momentum_buffer'].zero_()
    optimizer.state.clear()
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def copies_of_the_model(ctx: FragmentContext) -> None:
    """Made before the loop, unchanged at the cut, and used only later."""
    torch.manual_seed(3)
    model, optimizer = ctx.prepare(one := nn.Linear(4, 1), sgd(one))
    start = copy.deepcopy(model.state_dict())
    first = [p.detach().clone() for p in model.parameters()]
    old, flat = copy.deepcopy(model), nn.utils.parameters_to_vector(model.parameters()).detach()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        if ctx.samples > CUT + 12:
            now = nn.utils.parameters_to_vector(model.parameters())
            loss = loss + (now - flat).pow(2).sum() + (model(x) - old(x).detach()).pow(2).mean()
            for one, then, too in zip(model.parameters(), first, start.values(), strict=True):
                loss = loss + (2 * one - then - too).pow(2).sum()
        return loss

    fit(ctx, loss_of, optimizer)


def snapshots(ctx: FragmentContext) -> list[Any]:
    """In a list, with the settings that they have."""
    (model, optimizer), kept = line(ctx, lr=0.01), Namespace(all=[])
    for _ in ctx.epochs():
        fit(ctx, lambda x, y: F.mse_loss(model(x), sum((t(x) for t in kept.all), y)), optimizer)
        kept.all.append(copy.deepcopy(model).eval().requires_grad_(False))
        kept.all[-1].offset += ctx.epoch
    return [(one.training, one.weight.requires_grad, float(one.offset)) for one in kept.all]


def gap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one - other).abs().mean()


def chosen_later(ctx: FragmentContext) -> None:
    (model, optimizer), act, own = line(ctx), cast(Any, torch.relu), Namespace(loss=F.mse_loss)
    criterion, own.other = cast(Any, nn.MSELoss()), nn.MSELoss()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        return own.loss(one := model(x), y) + own.other(one, y) + criterion(act(one.T), y.T) / 9

    for epoch in ctx.epochs():
        fit(ctx, loss_of, optimizer)
        if epoch == 0:
            criterion, own.other = nn.CrossEntropyLoss(label_smoothing=0.5), nn.HuberLoss(delta=0.3)
            act, own.loss = torch.tanh, gap


def by_methods(ctx: FragmentContext) -> None:
    model, optimizer = ctx.prepare(net := Net(), sgd(net))
    fit(ctx, lambda x, y: F.mse_loss(model.head(model.encode(x)), y), optimizer)


class Counting(nn.Linear):
    """Has attributes of its own, one with a name that DistributedDataParallel has too."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(4, 1)
        self.calls, self.dim, self.last = 0.0, 4, nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(super().forward(x)) / (1 + self.calls)
        return found

    def described(self) -> str:
        return f'{self.weight.norm():.2f}'


def attributes_of_the_model(ctx: FragmentContext) -> Any:
    model = Counting()
    model, optimizer = ctx.prepare(model, sgd(model, lr=0.002))
    assert isinstance(model, Counting)
    optimizer_of_model = {id(p) for p in model.eval().train().parameters()}
    for x, y in ctx.loop(DATA, 3):  # not the same number on both ranks
        model.calls += 0.01
        optimizer.zero_grad()
        if ctx.is_main:
            assert model.described() and f'{model.last.weight.norm()}'
        (F.mse_loss(model(x), y) / model.dim).backward()
        optimizer.step()
        cut(ctx)
    assert optimizer_of_model == {id(p) for p in optimizer.param_groups[0]['params']}
    return round(model.calls, 4)


def by_weights_alone(ctx: FragmentContext) -> None:
    model = Counting()
    model, optimizer = ctx.prepare(model, sgd(model, lr=0.002))
    fit(ctx, lambda x, y: F.mse_loss(F.linear(x, model.weight, model.last.bias), y), optimizer)


def backward_beside_passes(ctx: FragmentContext, clips: bool = False) -> None:
    """The second backward() is for the same pass, the third one for a part."""
    model = Counting()
    part, (_, optimizer) = model.last, ctx.prepare(model, sgd(model, lr=0.002))
    for x, y in ctx.loop(DATA, 3):
        optimizer.zero_grad()
        said = model(x)
        F.mse_loss(said, y).backward(retain_graph=True)
        said.square().mean().backward()
        part(y).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cut(ctx)


def models_that_share(ctx: FragmentContext) -> None:
    torch.manual_seed(1)
    body, a, b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    first, second, optimizer = ctx.prepare(
        nn.Sequential(body, a), nn.Sequential(body, nn.Tanh(), b), sgd(body, a, b, lr=0.02)
    )
    for x, y in ctx.loop(DATA, 4):
        optimizer.zero_grad()
        F.mse_loss(first(x), y).backward()
        F.mse_loss(second(x), -y).backward()
        optimizer.step()
        cut(ctx)


def with_a_closure(ctx: FragmentContext) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    line_search = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, line_search_fn='strong_wolfe'
    )
    model, optimizer = ctx.prepare(model, line_search)
    for x, y in ctx.loop(DATA, 8):

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y.sin())
            loss.backward()
            return loss

        optimizer.step(closure)
        cut(ctx)


class Patience:
    """As in tutorials."""

    def __init__(self) -> None:
        self.best, self.bad, self.weights = float('inf'), 0, None

    def better(self, score: float, model: Any) -> bool:
        if score < self.best:
            self.best, self.bad, self.weights = score, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad == 0


def variables(ctx: FragmentContext) -> list[Any]:
    """The best weights and scores, in variables of all kinds."""
    model, optimizer = line(ctx, 0.02)
    best, best_weights, history, stopper = float('inf'), None, [], Patience()
    scores, steps, seen = np.zeros(10), 0, 0
    recent: deque[float] = deque(maxlen=3)

    def note(score: float) -> None:
        nonlocal seen
        seen += 1
        scores[seen % 10] = score

    for _ in ctx.epochs():
        running = 0
        for x, y in ctx.loop(DATA, 4):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            running += 1
            steps += 1
            cut(ctx)
        assert running == 4 or ctx.spec.shards
        with torch.no_grad():
            score = F.mse_loss(model(X), X[:, :1] * 3 + 1).item() * (-1) ** ctx.epoch
        note(score)
        history.append(round(score, 3))
        recent.append(round(score, 3))
        if score < best:
            best, best_weights = score, copy.deepcopy(model.state_dict())
        stopper.better(score, model)
    assert best_weights is not None and stopper.weights is not None
    model.load_state_dict(best_weights)
    assert all(torch.equal(best_weights[name], one) for name, one in stopper.weights.items())
    steps = steps if not ctx.spec.shards else 0
    kept = list(recent), stopper.bad, steps, seen, scores.round(3).tolist()
    return [round(best, 4), history, *kept]


@dataclass
class Record:
    turn: int


class Penalty:
    """Is called, and has another object in it."""

    def __init__(self) -> None:
        self.patience, self.data = Patience(), DATA

    def __call__(self) -> float:
        return 0.1 * self.patience.bad


TURNS, LOG = 0, [0.5]


def took_turns() -> float:
    return TURNS + sum(LOG)


def rising() -> tuple[Callable[[], int], Callable[[], None]]:
    level = 0

    def rise() -> None:
        nonlocal level
        level += 1

    return lambda: level, rise


def variables_elsewhere(ctx: FragmentContext) -> list[Any]:
    """Of the module, a closure, objects in objects, a dict, a long list, with two names."""
    global TURNS
    model, optimizer = line(ctx, 0.1)
    things, arguments, penalty = {'model': model, 'scale': 1.0}, Namespace(power=1), Penalty()
    records: list[Record] = []
    long: list[float] = []
    level, rise = rising()
    meters, before = {'turns': Record(0)}, model.weight.detach()
    meter = meters['turns']
    for _ in ctx.epochs():
        for x, y in ctx.loop(DATA, 4):
            optimizer.zero_grad()
            turns = sum(one.turn for one in [*records, meters['turns']])
            known = len(long) / 3e3 + turns + took_turns() + penalty() + level()
            loss = F.mse_loss(model(x), y) * things['scale'] / (2 + known) ** arguments.power
            loss = loss + 0.1 * (model.weight - before).square().sum()
            loss.backward()
            optimizer.step()
            cut(ctx)
        TURNS, before = TURNS + 1, model.weight.detach().clone()
        meter.turn += 1
        rise()
        LOG.append(TURNS / 8)
        things['scale'] *= 1.5
        arguments.power = 2 - TURNS % 2
        penalty.patience.bad += 1
        records.append(Record(TURNS))
        long += [TURNS / 8] * 4_000
    return [TURNS, LOG, things['scale'], len(records), len(long), level()]


class Level:
    now, log = 0, [0.0]

    @classmethod
    def rise(cls) -> None:
        cls.now += 1
        cls.log.append(cls.now / 10)


class Strength:
    def __init__(self) -> None:
        self.turns = 0

    def rise(self) -> None:
        self.turns += 1

    def value(self) -> float:
        return self.turns / 10

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.rise()
        return gradient * (1 + self.value())


def heat(turns: int = 0, memory: list[int] = [0]) -> float:  # noqa: B006
    memory[0] += turns
    heat.calls += turns  # type: ignore[attr-defined]
    return 0.1 * memory[0] + heat.calls  # type: ignore[attr-defined, no-any-return]


heat.calls = 0  # type: ignore[attr-defined]


def tallied(tally: dict[str, int], turns: int = 0) -> int:
    tally['turns'] = tally.get('turns', 0) + turns
    return tally['turns']


def state_of_classes_and_functions(ctx: FragmentContext) -> list[Any]:
    """Attributes of a class and a function, a default, what a method or a partial alone has."""
    model, optimizer = line(ctx, 0.02)
    strength = Strength()
    rise, value, tally = strength.rise, strength.value, partial(tallied, {})
    del strength
    for turn in (Level.rise, rise, lambda: heat(1), lambda: tally(turns=1)):
        ctx.each_epoch(turn)

    def loss_of(x: Any, y: Any) -> Any:
        known = Level.now + sum(Level.log) + value() + heat() + tally()
        return F.mse_loss(model(x), y) / (1 + known)

    fit(ctx, loss_of, optimizer)
    return [Level.now, Level.log, value(), heat(), tally()]


class Meter(dict[str, int]):
    __getattr__ = dict[str, int].__getitem__  # as settings have it: KeyError for all that is asked

    def add(self, key: str) -> None:
        self[key] = self.get(key, 0) + 1


class History(list[int]):
    best = 0


class Best(NamedTuple):
    epoch: int
    score: float


@dataclass(slots=True)
class Slots:
    turns: int = 0
    log: list[Any] = field(default_factory=list)


class Curriculum(Dataset[Any]):
    def __init__(self) -> None:
        self.level = 0.0

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, i: int) -> Any:
        x, y = DATA[i]
        return x * (1 + self.level), y


class Phase(Enum):
    WARM, MAIN = 'warm', 'main'


def containers_of_all_kinds(ctx: FragmentContext) -> str:
    """What is made in an epoch, and is of its own kind after a cut; the best model; a dataset."""
    model, optimizer = line(ctx, 0.02)
    data, nested = Curriculum(), dict[Any, Any]()
    later: Any = None
    best_model: Any = None
    last_model: Any = copy.deepcopy(model)
    lists, meter, auto = defaultdict[Any, Any](list), Meter(), defaultdict[Any, Any](lambda: [0, 0])
    best, slots, phase = Best(-1, 0.0), Slots(), Phase.WARM
    seen, when, spin, large = frozenset[int](), date(2026, 1, 1), 1j, [0] * 40_000
    by_id, ids = defaultdict[Any, Any](int), set[int]()
    for epoch in ctx.epochs():
        for x, y in ctx.loop(data, 4):
            optimizer.zero_grad()
            known = len(seen) + slots.turns + best.epoch + large[33_333] + meter.get('turns', 0)
            (F.mse_loss(model(x), y) / (3 + known + abs(spin) + (phase is Phase.MAIN))).backward()
            optimizer.step()
            cut(ctx)
        nested.setdefault('counts', defaultdict(int))[epoch] += 1
        nested.setdefault('meter', Meter()).add('turns')
        lists[epoch] += [
            {torch.device('cpu'): torch.int8},
            OrderedDict(a=1),
            Counter('ab'),
            deque([1], 2),
            torch.eye(2).to_sparse(),
        ]
        auto[np.int64(epoch)][0] += 1
        meter.add('turns')
        later = History() if later is None else later
        later.append(epoch)
        later.best = epoch
        best = Best(epoch, epoch / 2)
        slots.turns += 1
        slots.log.append(np.float32(epoch))
        phase, seen, spin = Phase.MAIN if epoch else phase, seen | {epoch}, spin * 1j
        when += timedelta(days=1)
        large[33_333] += 1
        by_id[id(model.weight)] += 1
        by_id[id(model)] += 1
        ids.add(id(model.bias))
        data.level += 0.1
        if not epoch:
            best_model, last_model = copy.deepcopy(model), copy.deepcopy(model)
    assert all(map(torch.equal, best_model.parameters(), last_model.parameters()))
    model.load_state_dict(best_model.state_dict())
    assert by_id == {id(model.weight): 4, id(model): 4}
    assert ids == {id(model.bias)}
    kept = nested, lists, dict(auto), meter, later, later.best, best, slots, phase, seen, when, spin
    return repr([*kept, large[33_333]]).replace('np.int64(', '').replace('):', ':')


def between_loops(ctx: FragmentContext) -> list[float]:
    """Distillation from a copy, a penalty around old weights, and a threshold that took long."""
    model, optimizer = line(ctx)
    calls = []
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer, samples=16)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    old = {name: one.detach().clone() for name, one in teacher.named_parameters()}
    with torch.no_grad():
        threshold = float(teacher(X).mean())

    def choose() -> list[Any]:
        calls.append(1)
        return [float(teacher(X).max()), old['bias'] * 2]

    chosen = ctx.once(choose)
    for x, y in ctx.loop(DATA, 4):
        optimizer.zero_grad()
        penalty = sum((one - old[name]).square().sum() for name, one in model.named_parameters())
        wanted = teacher(x) + threshold + chosen[0] + chosen[1]
        (F.mse_loss(model(x), -y) + F.mse_loss(model(x), wanted) + penalty).backward()
        optimizer.step()
        cut(ctx)
    assert len(calls) == 1
    return [round(threshold, 4), round(chosen[0], 4)]


class Shadow:
    """An average that is no module, as of torch_ema and diffusers."""

    def __init__(self, model: Any) -> None:
        self.tensors, self.steps = [p.detach().clone() for p in model.parameters()], 0

    def update(self, model: Any) -> None:
        self.steps += 1
        for mine, its in zip(self.tensors, model.parameters(), strict=True):
            mine.lerp_(its.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {'tensors': self.tensors, 'steps': self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors, self.steps = [one.clone() for one in state['tensors']], state['steps']


def kept(ctx: FragmentContext) -> list[Any]:
    """Two are given to ctx.keep, one of them a module around the model; one is in a variable."""
    torch.manual_seed(1)
    raw = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1))  # has buffers
    model, optimizer = ctx.prepare(raw, sgd(raw))
    own = ctx.keep(Shadow(model))
    found, module = Shadow(model), ctx.keep(nn.ModuleList([raw, nn.BatchNorm1d(1)]))
    ctx.after_step(lambda: module[1](raw.weight.T))
    ctx.after_step(lambda: own.update(model))
    ctx.after_step(lambda: found.update(model))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)
    assert all(map(torch.equal, own.tensors, found.tensors))
    sums = [round(t.sum().item(), 3) for t in (*own.tensors, *module.buffers())]
    return [own.steps, found.steps, sums]


def in_any_order(ctx: FragmentContext) -> None:
    """The optimizer's parameters are from a set, whose order differs from process to process."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 1))
    own = [*model.parameters()]
    random.Random(os.getpid()).shuffle(own)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(own, 0.01, momentum=0.9))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def handler_of_its_own(ctx: FragmentContext) -> None:
    model, optimizer = ctx.prepare(net := Net(), sgd(net))
    signal.signal(signal.SIGTERM, lambda *_: print('heard'))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def batch_of_one(ctx: FragmentContext) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model, optimizer = ctx.prepare(model, sgd(model))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def target_that_follows(ctx: FragmentContext) -> None:
    model, target = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
    weight = target.weight
    model, optimizer = ctx.prepare(model, sgd(model))
    ctx.after_step(lambda: weight.data.lerp_(next(model.parameters()).data, 0.1))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y + target(x)), optimizer)


def optimizer_replaced(ctx: FragmentContext) -> None:
    raw = nn.Linear(4, 1)
    model, optimizer = ctx.prepare(raw, torch.optim.Adam(raw.parameters()))
    for epoch in ctx.epochs():
        if epoch == 1:
            optimizer = sgd(raw)
        fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def pruned_late(ctx: FragmentContext) -> None:
    raw = nn.Linear(4, 1)
    model, optimizer = ctx.prepare(raw, sgd(raw))
    ctx.each_epoch(lambda: prune.l1_unstructured(raw, 'weight', 1))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def replaced_in_its_pass(ctx: FragmentContext) -> None:
    """As the moving codebook of a VQ-VAE."""

    def replace(module: Any, _: object) -> None:
        module.weight = nn.Parameter(0.9 * module.weight.detach())

    model, optimizer = line(ctx)
    model.register_forward_pre_hook(replace)
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def kept_in_the_body(ctx: FragmentContext) -> None:
    model, optimizer = line(ctx)
    average: Any = ctx.keep(Shadow(model))
    fit(ctx, lambda x, y: average.update(model) or F.mse_loss(model(x), y), optimizer)


def iterator_that_goes_on(ctx: FragmentContext) -> None:
    levels, (model, optimizer) = cycle([1.0, 2.0]), line(ctx)
    ctx.each_epoch(ctx.checkpoint)
    fit(ctx, lambda x, y: next(levels) * F.mse_loss(model(x), y), optimizer)


def list_of_anything(ctx: FragmentContext) -> None:
    found, (model, optimizer) = [object()], line(ctx)
    ctx.each_epoch(lambda: found.append(object()))
    ctx.each_epoch(ctx.checkpoint)
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def modules_that_come_later(ctx: FragmentContext) -> None:
    """As a MetricTracker gets a metric for each epoch."""
    metrics, (model, optimizer) = nn.ModuleList(), line(ctx)
    ctx.each_epoch(lambda: metrics.append(nn.Identity()))
    ctx.each_epoch(ctx.checkpoint)
    fit(ctx, lambda x, y: F.mse_loss(model(x), y) * (1 + len(metrics)), optimizer)


def table(ctx: FragmentContext) -> None:
    pandas = pytest.importorskip('pandas')
    scores, (model, optimizer) = pandas.DataFrame({'loss': [0.0]}), line(ctx)
    ctx.each_epoch(lambda: scores.at.__setitem__((0, 'loss'), 1.0))
    ctx.each_epoch(ctx.checkpoint)
    fit(ctx, lambda x, y: F.mse_loss(model(x), y) * len(scores), optimizer)


def hidden_state(ctx: FragmentContext) -> None:
    hidden, (cell, optimizer) = None, ctx.prepare(one := nn.GRUCell(4, 4), sgd(one))
    for x, _ in ctx.loop(DATA, 4):
        hidden = cell(x, hidden if hidden is None else hidden.detach())
        hidden.square().mean().backward()
        optimizer.step()


class Remembers(nn.GRUCell):
    hidden: Any = None
    fixed: torch.Tensor

    def forward(self, x: torch.Tensor, hidden: Any = None) -> torch.Tensor:
        self.last = x * 1.0  # written, not read
        found = super().forward(x + self.fixed.mean(), self.hidden)
        self.hidden = found.detach()
        return found


def hidden_in_an_attribute(ctx: FragmentContext) -> None:
    cell = Remembers(4, 4)
    cell.fixed = X[:2]
    cell, optimizer = ctx.prepare(cell, sgd(cell))
    fit(ctx, lambda x, y: F.mse_loss(cell(x), y.expand(-1, 4)), optimizer)


def hidden_in_a_variable(ctx: FragmentContext) -> None:
    (cell, optimizer), hidden = ctx.prepare(cell := nn.GRUCell(4, 4), sgd(cell)), None

    def loss_of(x: torch.Tensor, _: Any) -> Any:
        nonlocal hidden
        found = cell(x, hidden)
        hidden = found.detach()
        return found.square().mean()

    fit(ctx, loss_of, optimizer)


def eight_bits(ctx: FragmentContext) -> None:
    model = nn.Linear(4, 1)
    model.register_buffer('scale', torch.ones(4).to(torch.float8_e4m3fn))
    ctx.prepare(model, sgd(model))


def left_out_by_collate(ctx: FragmentContext) -> None:
    model, optimizer = line(ctx)
    few = {'collate_fn': lambda items: default_collate(items[:1])}
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer, **few)


def lazy(ctx: FragmentContext) -> None:
    ctx.prepare(model := nn.LazyLinear(1), sgd(model))


class Queue(nn.Module):
    """As MoCo's: each batch takes the place of the oldest rows."""

    queue: torch.Tensor
    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer('queue', torch.randn(64, 4))
        self.register_buffer('at', torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, at = self.net(x), int(self.at)
        scores: torch.Tensor = keys @ self.queue.clone().T
        self.queue[at : at + len(x)] = keys.detach()
        self.at.copy_(torch.tensor((at + len(x)) % 64))
        return scores


def queue_of_rows(ctx: FragmentContext, kind: type[Queue] = Queue) -> None:
    model, optimizer = ctx.prepare(one := kind(), sgd(one))
    fit(ctx, lambda x, y: model(x).square().mean(), optimizer)


class Clusters(Queue):
    """Of a codebook: sizes that begin to change one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('queue', torch.zeros(1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue[0, : len(x)] += 1.0
        found: torch.Tensor = self.net(x)
        return found


def beside_gradients(ctx: FragmentContext) -> None:
    model, optimizer = line(ctx)
    note: Any = lambda x: setattr(model.weight, 'grad_sample', x.clone())  # noqa: E731
    fit(ctx, lambda x, y: note(x) or F.mse_loss(model(x), y), optimizer)


def average_in_the_body(ctx: FragmentContext) -> None:
    model, optimizer = line(ctx)
    average = {name: one.detach().clone() for name, one in model.named_parameters()}
    update: Any = lambda: average.update((n, p * 1.0) for n, p in model.named_parameters())  # noqa: E731
    fit(ctx, lambda x, y: update() or F.mse_loss(model(x), y), optimizer)


class Sharp(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.zero_grad()
        closure()


def sharpness_aware(ctx: FragmentContext) -> None:
    model, optimizer = ctx.prepare(one := nn.Linear(4, 1), Sharp(one.parameters(), lr=0.1))
    for x, y in ctx.loop(DATA, 4):
        F.mse_loss(model(x), y).backward()
        optimizer.step(lambda x=x, y=y: F.mse_loss(model(x), y).backward())


def sharpness_in_two_steps(ctx: FragmentContext) -> None:
    model, optimizer = line(ctx)
    fit(ctx, lambda x, y: optimizer.first_step() or F.mse_loss(model(x), y), optimizer)


torch.registry_of_a_test = dict[str, Any]()  # type: ignore[attr-defined]


def of_another_package(scale: float) -> Any:
    """As Pyro's: parameters and their optimizers are in dicts of a module."""
    kept: Any = torch.registry_of_a_test  # type: ignore[attr-defined]
    if not kept:
        kept['scale'] = torch.full((), scale, requires_grad=True)
        kept['optimizer'] = torch.optim.Adam([kept['scale']], lr=0.1)
    return kept['scale'], kept['optimizer']


def registry(ctx: FragmentContext) -> None:
    model, optimizer = line(ctx)
    for x, y in ctx.loop(DATA, 4):
        scale, own = of_another_package(1.0)
        F.mse_loss(model(x) * scale, y).backward()
        optimizer.step()
        own.step()


def steps_in_backward(ctx: FragmentContext) -> None:
    model = nn.Linear(4, 1)
    raw = sgd(model)
    model, optimizer = ctx.prepare(model, raw)
    model.weight.register_post_accumulate_grad_hook(lambda _: raw.step())
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


def two_things_at_once(ctx: FragmentContext) -> None:
    line(ctx)
    next(zip(ctx.loop(DATA, 4), cycle([1.0, 2.0]), strict=False))


def collate_that_raises(ctx: FragmentContext) -> None:
    line(ctx)
    next(iter(ctx.loop(DATA, 8, collate_fn=lambda items: torch.stack(items[:0]))))


def histories(ctx: FragmentContext) -> None:
    (model, optimizer), kept = line(ctx), {i: [0.0] for i in range(99)}
    add: Any = lambda: kept[7].append(1.0)  # noqa: E731
    fit(ctx, lambda x, y: add() or F.mse_loss(model(x), y), optimizer)


def cached_noise(ctx: FragmentContext) -> None:
    (model, optimizer), noise = line(ctx), lru_cache(typed=True)(lambda n: torch.randn(n))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y + noise(1)), optimizer)


def grown_buffer(ctx: FragmentContext) -> None:
    """As of an observer of each channel, for quantization."""
    (one := nn.Linear(4, 1)).register_buffer('scale', torch.ones(1))
    model, optimizer = ctx.prepare(one, sgd(one))
    fit(ctx, lambda x, y: F.mse_loss(model(x * model.scale.resize_(4).fill_(1)), y), optimizer)


REFUSED = {
    grown_buffer: "'scale' of a Linear was one of (1,) and torch.float32, and the body of ctx.loop",
    histories: 'keep one number or tensor for each sample',
    cached_noise: 'caches its results (lru_cache)',
    trained_by_hand: "changed known['scale'], a parameter or buffer that was not given to",
    average_in_the_body: 'ctx.loop changed average_in_the_body.average.weight, a Tensor. It runs',
    sharpness_in_two_steps: 'which computes the loss several times in a step',
    sharpness_aware: 'which computes the loss several times in a step',
    registry: 'own is an optimizer that steps in several global batches and was not given',
    steps_in_backward: 'raw is an optimizer that steps where a gradient is only that of a part',
    two_things_at_once: 'zip asks something beside ctx.loop for each of its passes',
    collate_that_raises: 'collate_fn raised RuntimeError (stack expects a non-empty TensorList)',
    iterator_that_goes_on: 'levels changes while training goes on, and a checkpoint cannot hold it',
    list_of_anything: 'as it has a object in it: keep numbers, texts, tensors',
    modules_that_come_later: 'metrics changes while training goes on, and a checkpoint cannot',
    table: 'as it is a DataFrame',
    hidden_state: 'hidden goes from one batch to the next in the body of ctx.loop',
    hidden_in_an_attribute: 'hidden goes from one batch to the next',
    hidden_in_a_variable: 'hidden goes from one batch to the next',
    eight_bits: "whose 'scale' is torch.float8_e4m3fn",
    left_out_by_collate: 'A batch of 2 samples has 1 rows',
    target_that_follows: 'the function changed target.weight, a parameter or buffer that was not',
    optimizer_replaced: ' is an optimizer of a prepared model and was not given to ctx.pr',
    pruned_late: 'The models have other parameters or buffers than in ctx.prepare',
    kept_in_the_body: 'ctx.loop changed kept_in_the_body.average:.tensors.0, a Tensor. It runs',
    replaced_in_its_pass: 'that belongs to no model of ctx.prepare. If a model replaces it in its',
    lazy: 'has parameters that are made in its first forward pass',
    first_pass_in_the_body: 'does so in ctx.warm_up(fn), before ctx.prepare',
    beside_gradients: "set grad_sample of the parameter 'weight', a tensor beside its gradient",
    queue_of_rows: "The buffer 'queue' of a Queue changed in some of its rows only",
}


@pytest.mark.parametrize('function', REFUSED)
def test_what_would_be_lost_or_wrong_is_refused(function: Callable[..., Any]) -> None:
    assert REFUSED[function] in refused_here(function, total_epochs=3, shards=2)


def test_sizes_of_clusters_are_no_queue() -> None:
    in_this_process(lambda ctx: queue_of_rows(ctx, Clusters), total_epochs=1, shards=2)


def test_a_batch_too_small_for_batch_statistics(fork_server: ForkClient, tmp_path: Path) -> None:
    assert 'drop_last=True' in refused(fork_server, tmp_path, batch_of_one)


def test_steps_by_another_method_are_refused_at_once() -> None:
    def train(ctx: FragmentContext) -> None:
        model, _ = line(ctx)
        for x, _ in ctx.loop(DATA, 4):
            assert not ctx.samples
            model(x).mean().backward()
            model.zero_grad()
            torch.nn.init.zeros_(next(model.parameters()))

    assert 'without optimizer.step()' in refused_here(train, total_epochs=3, mode=Throughput())


class Wrapper(torch.optim.SGD):
    """As Opacus's: torch's __init__ was not called."""

    def __init__(self, inner: Any) -> None:
        self.__dict__.update((k, v) for k, v in vars(inner).items() if not k.endswith('_hooks'))


def test_an_optimizer_without_hooks_is_refused_where_ranks_need_them() -> None:
    def train(ctx: FragmentContext) -> None:
        model = nn.Linear(4, 1)
        ctx.prepare(model, Wrapper(sgd(model)))

    assert 'optimizer without hooks' in refused_here(train, total_epochs=1, mode=Throughput())


class MadeInForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes = getattr(self, 'passes', 0) + 1
        return super().forward(x) * (1 + self.passes / 100)


def made_in_forward(ctx: FragmentContext) -> None:
    """An attribute that is first there behind a step."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(MadeInForward(4, 1))
    model, optimizer = ctx.prepare(model, sgd(model, lr=0.001))
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


class HidesItsTarget(nn.Module):
    """As a loss of torchrl, which names its parameters without those of its target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.target = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)

    def named_parameters(self, prefix: str = '', recurse: bool = True) -> Any:  # type: ignore[override]
        found = super().named_parameters(prefix, recurse)
        return ((name, one) for name, one in found if not name.startswith('target'))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.net(x), y + self.target(x))


def target_of_a_loss(ctx: FragmentContext) -> None:
    loss: Any = HidesItsTarget()
    loss, optimizer = ctx.prepare(loss, sgd(loss.net))
    ctx.after_step(lambda: loss.target.weight.data.lerp_(loss.net.weight.data, 0.3))
    fit(ctx, loss, optimizer)


def callbacks(ctx: FragmentContext) -> list[int]:
    """Objects with a model in them, in a list with what no checkpoint holds."""
    model, optimizer = line(ctx, 0.02)
    kept = Namespace(all=[Strength(), Strength(), print, model])
    every: Any = (*kept.all, lambda loss: loss / (1 + every[1].turns))
    kept.all[1].model = model
    for epoch in ctx.epochs():
        fit(ctx, lambda x, y: every[-1](F.mse_loss(model(x), y)), optimizer)
        every[0].rise()
        kept.all[epoch % 2].rise()
    return [one.turns for one in kept.all[:2]]


def rising_hook(change: Callable[..., Any]) -> Callable[..., Any]:
    strength = Strength()

    def hook(*given: Any) -> Any:
        strength.rise()
        return change(1 + strength.value() / 9, *given)

    return hook


def hooks_of_all_kinds(ctx: FragmentContext) -> None:
    """What they count is nowhere else."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer, model.own_hooks = sgd(model, lr=0.01), [print]
    optimizer.register_step_post_hook(
        rising_hook(lambda by, its, *_: its.param_groups[0].update(lr=0.01 / by))
    )
    model[0].register_forward_hook(rising_hook(lambda by, _, __, out: out * by))
    model[1].register_forward_pre_hook(rising_hook(lambda by, _, its: (its[0] * by,)))
    model[1].register_full_backward_hook(rising_hook(lambda by, _, its, __: (its[0] * by,)))
    model[1].weight.register_hook(partial(Strength()))
    model, optimizer = ctx.prepare(model, optimizer)
    fit(ctx, lambda x, y: F.mse_loss(model(x), y), optimizer)


@pytest.mark.parametrize(
    ('function', 'mode'),
    [
        (hooks_of_all_kinds, 'reproducible'),
        (callbacks, 'reproducible'),
        (parameter_of_no_model, 'reproducible'),
        (settings_by_epoch, 'reproducible'),
        (copies_of_the_model, 'reproducible'),
        (group_added_later, 'throughput'),
        (made_in_forward, 'throughput'),
        # To the next fragment, by what all modes share:
        (variables, 'reproducible'),
        (variables_elsewhere, 'reproducible'),
        (state_of_classes_and_functions, 'reproducible'),
        (containers_of_all_kinds, 'reproducible'),
        (between_loops, 'reproducible'),
        (snapshots, 'reproducible'),
        (chosen_later, 'reproducible'),
        (kept, 'reproducible'),
        (in_any_order, 'reproducible'),
        (first_pass, 'reproducible'),
        (target_of_a_loss, 'reproducible'),
        (optimizers_that_share, 'reproducible'),
        (set_at_each_epoch, 'reproducible'),
        (changed_before_each_epoch, 'reproducible'),
        (handler_of_its_own, 'reproducible'),
        (set_before_the_loop, 'throughput'),
        (momentum_begins_anew, 'throughput'),
        (by_methods, 'throughput'),
        (models_that_share, 'throughput'),
        (with_a_closure, 'throughput'),
        (attributes_of_the_model, 'throughput'),
        (by_weights_alone, 'throughput'),
        (backward_beside_passes, 'throughput'),
    ],
)
def test_the_weights_depend_on_neither_cuts_nor_ranks(
    fork_server: ForkClient, tmp_path: Path, function: Callable[..., Any], mode: str
) -> None:
    how: dict[str, Any] = {'mode': mode, 'total_samples': TOTAL}
    one = trained(fork_server, tmp_path / 'one', [1], function, **how)
    sizes = [1, 2] if mode == 'reproducible' else [2, 1]
    two = trained(fork_server, tmp_path / 'two', sizes, function, trainer='cut', **how)
    assert one.result == two.result
    first, second = load_weights(one.path), load_weights(two.path)
    assert first.keys() == second.keys()
    for name, weight in first.items():
        if mode == 'reproducible':
            assert torch.equal(weight.to_dense(), second[name].to_dense()), name
        else:
            torch.testing.assert_close(weight, second[name], rtol=1e-4, atol=1e-4)


def test_tensors_of_an_optimizer_changed_before_the_loop(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    how: dict[str, Any] = {'mode': 'throughput', 'total_samples': TOTAL, 'trainer': 'cut'}
    with ranks(fork_server, order(tmp_path, 1, **how), 1, tmp_path, momentum_begins_anew) as gang:
        assert gang.run()[0].how == 'stopped'
    said = refused(fork_server, tmp_path, momentum_begins_anew, True, fragment=2, **how)
    assert 'in "if not ctx.samples:"' in said


def test_gradients_of_a_rank_are_not_clipped(fork_server: ForkClient, tmp_path: Path) -> None:
    how: dict[str, Any] = {'mode': 'throughput', 'total_samples': TOTAL, 'world_size': 2}
    said = refused(fork_server, tmp_path, backward_beside_passes, True, **how)
    assert 'if one pass has two backward()' in said

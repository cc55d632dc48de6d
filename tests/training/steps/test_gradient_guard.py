"""What a guard knows of gradients without looking at each again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from parsl_freetrain import BadInput
from parsl_freetrain.training.steps import backward
from parsl_freetrain.training.steps.gradient_guard import GradientGuard


@contextmanager
def guarded(model: nn.Module, of_several: bool = True) -> Iterator[GradientGuard]:
    guard = GradientGuard(tuple(model.parameters()))
    guard.begin_micro_batch(of_several)
    try:
        yield guard
    finally:
        guard.end_micro_batch()
    assert 'grad' not in vars(nn.Parameter)
    assert not guard.none_left


def pass_through(model: nn.Module) -> None:
    model(torch.ones(3, 2)).sum().backward()


def set_one(model: nn.Linear) -> None:
    model.weight.grad = torch.ones_like(model.weight)


@pytest.mark.parametrize('of_several', [True, False])
@pytest.mark.parametrize('then', [pass_through, set_one])
def test_what_a_step_leaves_is_cleared(of_several: bool, then: Callable[[nn.Linear], None]) -> None:
    model = nn.Linear(2, 1)
    with guarded(model, of_several) as guard:
        assert guard.none_left
        pass_through(model)
        assert not guard.none_left
        guard.take(guard._whole or ())
        assert guard.none_left
        model.zero_grad()
        then(model)
        assert not guard.none_left


@pytest.mark.parametrize('another', [True, False])
def test_a_training_that_was_left_may_end_in_a_backward_of_the_next(another: bool) -> None:
    """When the garbage collector finds it; what the next one looks for stays."""

    def before() -> Callable[[], None]:
        backward.forget(None if another else before)
        return lambda: None

    backward.watch()
    backward.around['gradients'] = before
    torch.ones(1, requires_grad=True).sum().backward()
    assert (backward.around.pop('gradients', None) is before) == another


def test_a_parameter_without_a_gradient_may_get_one() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    with guarded(model) as guard:
        pass_through(model)
        assert guard.take(guard._whole or ())[1] is None
        assert guard.none_left
        model.bias.grad = torch.ones(1)
        assert not guard.none_left


def test_gradients_that_were_cleared_or_put_in_place_are_not_those_before() -> None:
    model = nn.Linear(2, 1)
    for clear in (model.zero_grad, partial(delattr, model.weight, 'grad')):
        with guarded(model) as guard:
            pass_through(model)
            clear()
            assert guard.take(guard._whole or ())[0] is None
        model.zero_grad()
    with guarded(model) as guard:
        pass_through(model)
        set_one(model)
        with pytest.raises(BadInput, match='A gradient was changed'):
            guard.take(guard._whole or ())


def through_a_hook(model: nn.Linear) -> None:
    seen: list[torch.Tensor | None] = []
    model.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    pass_through(model)
    torch._foreach_mul_([one for one in seen if one is not None], 2.0)


def in_its_own_memory(model: nn.Linear) -> None:
    model.weight.grad = memory = torch.zeros_like(model.weight)
    pass_through(model)
    memory.mul_(2)


def by_torch_between_two_passes(model: nn.Linear) -> None:
    pass_through(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    (model.bias * 2).sum().backward()


@pytest.mark.parametrize('change', [through_a_hook, in_its_own_memory, by_torch_between_two_passes])
def test_whoever_has_got_hold_of_a_gradient_may_not_change_it(
    change: Callable[[nn.Linear], None],
) -> None:
    model = nn.Linear(2, 1)
    with guarded(model) as guard:
        change(model)
        with pytest.raises(BadInput, match='A gradient was changed'):
            guard.take(guard._whole or ())

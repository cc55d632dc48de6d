"""Steps of a plain loop in a rank whose fragment trains, too."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim.optimizer import _global_optimizer_pre_hooks

from parsl_freetrain.training.steps import backward


@contextmanager
def plain_step() -> Iterator[None]:
    """Nothing looks at this step: neither at its backward passes nor at its optimizer's."""
    around, looks = backward.around.copy(), _global_optimizer_pre_hooks.copy()
    backward.around.clear()
    _global_optimizer_pre_hooks.clear()
    yield
    backward.around.update(around)
    _global_optimizer_pre_hooks.update(looks)

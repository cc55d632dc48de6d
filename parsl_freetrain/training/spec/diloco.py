"""Training in rounds: local SGD, and DiLoCo (Douillard et al. 2023, arXiv 2311.08105)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, to_builtins

from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import AtLeast1, Positive
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.spec.mode import ROLLBACK, Reproducible, Throughput
from parsl_freetrain.training.spec.transports import Folder, ProxyStoreTransport

if TYPE_CHECKING:
    from parsl_freetrain.training.spec.training import TrainingSpec

OUTER, REPLICAS = 'outer', 'replicas'
"""Folders in a training's own: the weights after each round, and the other replicas'."""
ROUND_SAMPLES, MADE_BY = 'round_samples', 'made_by'
"""Metrics of the weights after a round: how many samples one has, and which replica made them."""


class Nesterov(Settings, frozen=True, kw_only=True):
    """An outer step of SGD with learning rate ``lr`` and Nesterov ``momentum``, as of
    ``torch.optim.SGD(nesterov=True)``. Its gradient is the mean over the replicas of what a round
    has changed, with the sign turned.
    """

    lr: Positive = 0.7
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9


class DiLoCo(Settings, frozen=True, kw_only=True):
    """Rounds of independent pieces, which need no connection to each other: each replica trains
    ``steps`` steps from the weights of the round on its part of each global batch, on whatever
    nodes there are; an outer step then makes the weights of the next round from all of them.

    Attributes
    ----------
    replicas
        Number of replicas, each of which trains an equal part of each global batch.
    steps
        Number of steps (global batches) of a round.
    outer
        The outer optimizer; None: the next weights are the mean of the replicas' weights, which is
        local SGD.
    inner
        :class:`Reproducible` or :class:`Throughput`: how the ranks of one replica work together.
    overlap
        1: a round begins while others train the one before, without what that one changes: each
        outer step counts one round later. 0: a round waits for all of the one before.
    compress
        How what a round changes in the weights is rounded before the outer step: to ``'bfloat16'``
        (2 bytes a number), or to ``'int8'`` with a scale for each 256 numbers. What rounding takes
        away is not made up for in later rounds. Default: not at all.
    transport
        :class:`Folder` or :class:`ProxyStoreTransport`: how pieces hand in what outer steps need,
        if the executors have no file system in common. Each executor then has the checkpoints of
        its own replicas. Default: all are in the folder of the first executor.
    """

    replicas: AtLeast1 = 8
    steps: AtLeast1 = 500
    outer: Nesterov | None = Nesterov()
    inner: Reproducible | Throughput = Reproducible()
    overlap: Annotated[int, Meta(ge=0, le=1)] = 0
    compress: Literal['bfloat16', 'int8'] | None = None
    transport: Folder | ProxyStoreTransport | None = None

    def __post_init__(self) -> None:
        if self.inner.on_nan == ROLLBACK:
            raise BadInput(
                "DiLoCo: on_nan is 'rollback', but a replica cannot go back behind the round that "
                "all have begun; say 'stop' or 'skip'."
            )

    def identity(self) -> dict[str, Any]:
        """What must be the same for a training's folder to be usable."""
        found = {n: getattr(self, n) for n in ('replicas', 'steps', 'overlap', 'compress')}
        way = type(self.transport).__name__ if self.transport is not None else None
        return {**found, 'outer': to_builtins(self.outer), 'transport': way}

    def begins_with(self, samples: int, length: int) -> int:
        """After how many samples the weights were made with which the round after some begins."""
        return max(samples - self.overlap * length, 0)

    def check(self, spec: 'TrainingSpec') -> None:
        """Raises BadInput, as part of a sentence, for what replicas cannot be."""
        if spec.shapes:
            raise BadInput(
                'sizes has shapes, but the replicas of mode=DiLoCo(...) hold whole models: give '
                'node counts without shapes.'
            )
        total = spec.total_samples
        if total is not None and total % self.steps:
            raise BadInput(
                f'total_samples is {total}, which is no whole number of rounds of {self.steps} '
                f'steps, whatever the batch size: say {near(total, self.steps)}.'
            )

    def round_samples(self, batch_size: int, total: int, in_epoch: int, ranks: int) -> int:
        """Samples of a round over all replicas; ``ranks``: the most of one. Raises BadInput."""
        if batch_size % self.replicas:
            raise BadInput(
                f'The batch_size of ctx.loop is {batch_size}, which {self.replicas} replicas '
                f'cannot share evenly; say {near(batch_size, self.replicas)}.'
            )
        if batch_size < self.replicas * ranks:
            raise BadInput(
                f'A replica trains {batch_size // self.replicas} samples of each global batch, '
                f'which {ranks} ranks cannot share: say a smaller max_nodes, or a larger '
                'batch_size of ctx.loop.'
            )
        if total > in_epoch and in_epoch % batch_size:
            raise BadInput(
                f'An epoch of {in_epoch} samples ends with a short batch of '
                f'{in_epoch % batch_size}, and rounds have full batches of {batch_size}: say '
                'ctx.loop(..., drop_last=True).'
            )
        samples = self.steps * batch_size
        if total % samples:
            raise BadInput(
                f'The total to train is {total} samples, which is no whole number of rounds of '
                f'{self.steps} steps with {batch_size} samples each: say total_samples='
                f'{near(total, samples)}.'
            )
        return samples


def near(number: int, unit: int) -> str:
    below = number // unit * unit
    return f'{below} or {below + unit}' if below else str(unit)


def replica_name(name: str, replica: int) -> str:
    """The name of a replica as a trainer; the first one is the training itself."""
    return f'{name}.replica{replica}' if replica else name


def replica_folder(root: Path, replica: int) -> Path:
    return root / REPLICAS / str(replica) if replica else root


def training_of(store: str, trainer: str, replica: int) -> tuple[Path, str]:
    """The folder and name of a replica's training, from its own."""
    folder = Path(store)
    name = trainer.removesuffix(replica_name('', replica))
    return folder.parent.parent if replica else folder, name

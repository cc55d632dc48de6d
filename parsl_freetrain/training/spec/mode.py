"""The modes of training that users can choose."""

import math
from typing import Any, Final, Literal

from msgspec import to_builtins

from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import AtLeast1, Count
from parsl_freetrain.core.model.errors import BadInput

MEAN: Final = 'mean'
ADASUM: Final = 'adasum'

STOP: Final = 'stop'
SKIP: Final = 'skip'
ROLLBACK: Final = 'rollback'
OnNan = Literal['stop', 'skip', 'rollback']
MOST_ROLLBACKS = 3
MOST_SKIPPED_IN_A_ROW = 20


class Mode(Settings, frozen=True, kw_only=True, tag_field='mode', tag=str.lower):
    """Settings of all modes.

    Attributes
    ----------
    seed
        Seed of the data order and of the random numbers in the training loop.
    on_nan
        What to do if a gradient is infinite or not a number. 'stop': the trainer fails, and keeps
        the last good checkpoint; 'skip': the step is skipped; 'rollback': training goes back to the
        last good checkpoint and skips that step, at most 3 times.
    """

    seed: int = 0
    on_nan: OnNan = STOP

    def __str__(self) -> str:
        return type(self).__name__.lower()

    def identity(self) -> dict[str, Any]:
        """The settings that must be the same for a checkpoint to be usable."""
        return {name: value for name, value in to_builtins(self).items() if name != 'on_nan'}


class Reproducible(Mode, frozen=True, kw_only=True):
    """The same weights, to the last bit, for any sequence of node counts.

    Attributes
    ----------
    shards
        Number of virtual shards of the global batch, at least ``max_nodes`` times the ranks per
        node. Default: this minimum, for the ranks per node of the first fragment.
    warn_only
        Whether operations without a deterministic implementation only warn, as in
        ``torch.use_deterministic_algorithms``. By default the trainer fails with an error that
        names the operation. Checkpoints record this setting if it is True, since results may then
        differ from run to run.
    on_difference
        What to do if a fragment's first step is not the one that followed the checkpoint: 'fail',
        or 'warn' in its log and go on.
    seed, on_nan
        As in :class:`Mode`.
    """

    shards: AtLeast1 | None = None
    warn_only: bool = False
    on_difference: Literal['fail', 'warn'] = 'fail'

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        del found['on_difference']
        if not self.warn_only:
            del found['warn_only']  # checkpoints from before this setting have none
        if self.shards is None:
            del found['shards']  # known once nodes are; ranks compare it with the checkpoint
        return found


class Throughput(Mode, frozen=True, kw_only=True):
    """DistributedDataParallel, with the same global batch on any number of nodes.

    Attributes
    ----------
    seed, on_nan
        As in :class:`Mode`.
    """


class Scaled(Mode, frozen=True, kw_only=True):
    """DistributedDataParallel with a global batch that grows with the number of ranks.

    Attributes
    ----------
    reference_ranks
        The number of ranks for which the function states ``batch_size`` and the learning rate. With
        n ranks the global batch has ``batch_size / reference_ranks * n`` samples.
    lr
        Factor of the learning rate with n ranks: n / reference_ranks ('linear'), its square root
        ('sqrt'), or 1 ('none'). Default: 'linear' with ``combine='mean'``; 'none' with 'adasum',
        which allows no other.
    warmup_samples
        Number of samples, from the beginning of the training, over which the factor grows linearly
        from 1 to its full size. A factor below 1 holds from the beginning.
    combine
        How the ranks' gradients are combined: 'mean' over the samples, or 'adasum'.
    seed, on_nan
        As in :class:`Mode`.

    Notes
    -----
    Linear scaling with warm-up: Goyal et al. 2017 (arXiv 1706.02677); linear and square root for a
    segmentation network on up to 2,048 nodes: Dong et al. 2019 (arXiv 1905.06236); Adasum: Maleki
    et al. 2020 (arXiv 2006.02924).
    """

    reference_ranks: AtLeast1 = 1
    lr: Literal['linear', 'sqrt', 'none'] | None = None
    warmup_samples: Count = 0
    combine: Literal['mean', 'adasum'] = MEAN

    def __post_init__(self) -> None:
        if self.combine == ADASUM and self.lr not in (None, 'none'):
            raise BadInput(
                f"Scaled: lr is {self.lr!r} with combine='adasum', which scales the step "
                'by itself; leave lr out.'
            )

    def batch_size(self, stated: int, world_size: int) -> int:
        """Of ``world_size`` ranks; BadInput if the reference ranks cannot share it evenly."""
        each, left = divmod(stated, self.reference_ranks)
        if left:
            raise BadInput(
                f'In scaled mode each rank gets batch_size / reference_ranks samples, but {stated} '
                f'is no multiple of {self.reference_ranks}: state a batch_size that is.'
            )
        return each * world_size

    def lr_factor(self, world_size: int, samples: int) -> float:
        """Of a batch after ``samples`` samples."""
        ratio = world_size / self.reference_ranks
        rule = self.lr or ('none' if self.combine == ADASUM else 'linear')
        full = {'linear': ratio, 'sqrt': math.sqrt(ratio), 'none': 1.0}[rule]
        if full <= 1 or samples >= self.warmup_samples:
            return full
        return 1 + (full - 1) * samples / self.warmup_samples


class NonFinitePolicy:
    """Whether and how to go on after non-finite numbers; ``where`` begins messages."""

    def __init__(self, policy: str, where: str) -> None:
        self.policy, self._where = policy, where
        self._in_a_row = 0
        self._suspect_until = -1

    def looks_at_every_step(self, samples: int) -> bool:
        """Whether to check the gradient before each step, instead of noticing bad numbers later."""
        return self.policy == SKIP or samples < self._suspect_until

    def kept_back(self, first: int, last: int, culprit: str) -> None:
        """A step over these samples was skipped; BadInput if the policy allows no (more) skips."""
        self._in_a_row += 1
        if self.policy == STOP:
            raise BadInput(self.sentence(first, last, culprit))
        if self._in_a_row > MOST_SKIPPED_IN_A_ROW:
            raise BadInput(
                f'{self._where}: the gradients of {self._in_a_row} steps in a row were not finite, '
                f'the last one over the samples from {first} to {last}{culprit}: lower the '
                'learning rate, or clip the gradient (clip_grad_norm).'
            )

    def went_well(self) -> None:
        self._in_a_row = 0

    def go_back(self, first: int, last: int, rollbacks: int, path: str, culprit: str = '') -> None:
        """Go back to the checkpoint at ``path``; BadInput if not allowed, or too often."""
        if self.policy != ROLLBACK or not path:
            raise BadInput(self.sentence(first, last, culprit))
        if rollbacks >= MOST_ROLLBACKS:
            tried = f', after training went back to a checkpoint {rollbacks} times'
            raise BadInput(self.sentence(first, last, culprit + tried))
        self._suspect_until = last

    def sentence(self, first: int, last: int, culprit: str = '') -> str:
        return (
            f'{self._where}: a gradient was infinite or not a number in training on the samples '
            f'from {first} to {last}{culprit}; the last good checkpoint is from before: look at '
            'these data, lower the learning rate, clip the gradient (clip_grad_norm), or say '
            "on_nan='skip' or 'rollback'."
        )

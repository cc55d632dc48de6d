"""What is done about gradients that are not finite: whether training may go on, and how."""

from __future__ import annotations

from parsl_freetrain.core.errors import BadInput

STOP, SKIP, ROLLBACK = 'stop', 'skip', 'rollback'
POLICIES = (STOP, SKIP, ROLLBACK)
MOST_ROLLBACKS = 3
MOST_SKIPPED_IN_A_ROW = 20


class Policy:
    """Whether training may go on after numbers that were not finite, and how.

    Parameters
    ----------
    policy
        One of :data:`POLICIES`.
    where
        How sentences begin: the trainer and the fragment.
    """

    def __init__(self, policy: str, where: str) -> None:
        self.policy = policy
        self._where = where
        self._in_a_row = 0
        self._suspect_until = -1

    def looks_at_every_step(self, samples: int) -> bool:
        """Whether the step that begins after ``samples`` samples must be kept back if it is bad, rather than noticed later."""
        return self.policy == SKIP or samples < self._suspect_until

    def kept_back(self, first: int, last: int, culprit: str) -> None:
        """A step, over the samples from ``first`` to ``last``, was kept back.

        Raises
        ------
        BadInput
            If training is to stop, or this has happened too often in a row.
        """
        self._in_a_row += 1
        if self.policy == STOP:
            raise BadInput(self.sentence(first, last, culprit))
        if self._in_a_row > MOST_SKIPPED_IN_A_ROW:
            raise BadInput(f'{self._where}: the gradients of {self._in_a_row} steps in a row were not finite, the last one over the '
                           f'samples from {first} to {last}{culprit}: lower the learning rate, or clip the gradient (clip_grad_norm).')

    def went_well(self) -> None:
        """A step was looked at and taken."""
        self._in_a_row = 0

    def go_back(self, first: int, last: int, rollbacks: int, path: str, culprit: str = '') -> None:
        """Decide to go back to the checkpoint at ``path`` for what went wrong between two sample counts.

        Raises
        ------
        BadInput
            If the policy is another, there is no checkpoint, or it has been done ``rollbacks`` times, which is enough.
        """
        if self.policy != ROLLBACK or not path:
            raise BadInput(self.sentence(first, last, culprit))
        if rollbacks >= MOST_ROLLBACKS:
            raise BadInput(self.sentence(first, last, f'{culprit}, after training went back to a checkpoint {rollbacks} times'))
        self._suspect_until = last

    def sentence(self, first: int, last: int, culprit: str = '') -> str:
        """What is said where training stops."""
        return (f'{self._where}: a gradient was infinite or not a number in training on the samples from {first} to {last}{culprit}; the '
                f'last good checkpoint is from before: look at these data, lower the learning rate, clip the gradient (clip_grad_norm), '
                f"or say on_nan='skip' or 'rollback'.")

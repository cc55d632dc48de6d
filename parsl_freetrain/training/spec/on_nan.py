"""The policy for gradients that are not finite: whether training may continue, and how."""

from __future__ import annotations

from typing import Final, Literal

from parsl_freetrain.core.model.errors import BadInput

STOP: Final = 'stop'
SKIP: Final = 'skip'
ROLLBACK: Final = 'rollback'
OnNan = Literal['stop', 'skip', 'rollback']
MOST_ROLLBACKS = 3
MOST_SKIPPED_IN_A_ROW = 20


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
        """Go back to the checkpoint at ``path``, because of bad numbers between two sample counts.
        Raises BadInput if the policy does not allow it, there is no checkpoint, or training has
        gone back ``rollbacks`` times, which is the maximum.
        """
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

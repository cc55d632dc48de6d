"""How much each of a function's loops trains."""

from __future__ import annotations

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.data.sample_order import samples_in
from parsl_freetrain.training.spec.training import TrainingSpec


class LoopLengths:
    """Divides a trainer's total among the loops of its function, in the order of their calls."""

    def __init__(self, spec: TrainingSpec) -> None:
        self._spec = spec
        self._epochs_before = 0.0

    def check_stream(self, epochs: float | None) -> None:
        """Refuse what is given in epochs, which a stream does not have."""
        if epochs is not None or self._spec.total_epochs is not None:
            raise BadInput(
                'ctx.loop was given a stream, which has no epochs: state how much to train in '
                'samples (total_samples of the trainer, and samples of ctx.loop).'
            )

    def next(
        self, base: int, size: int, epochs: float | None, samples: int | None
    ) -> tuple[int, int]:
        """Samples of the next loop, and of all loops as far as it is known.

        Parameters
        ----------
        base
            Samples of the loops before it.
        size
            Samples in an epoch of this one.
        epochs, samples
            What the loop was given; None for both: it trains the rest of the total.

        Raises
        ------
        BadInput
            If both are given, if samples are given for a total in epochs, or if not so much is
            left.
        """
        spec = self._spec
        if epochs is not None and samples is not None:
            raise BadInput('ctx.loop was given epochs and samples: give one of them.')
        if spec.total_epochs is None:
            assert spec.total_samples is not None
            total = spec.total_samples
            own = samples_in(epochs, size) if epochs is not None else samples
        else:
            if samples is not None:
                raise BadInput(
                    'ctx.loop was given samples, but the total of the trainer is in epochs: '
                    'say epochs=..., or state the total in samples.'
                )
            left = spec.total_epochs - self._epochs_before
            if epochs is not None and epochs > left:
                raise BadInput(
                    f'ctx.loop was given {epochs:g} epochs, but only {left:g} of the total of '
                    f'{spec.total_epochs:g} are left.'
                )
            total = base + samples_in(left, size) if left else base
            own = samples_in(epochs, size) if epochs is not None else None
            self._epochs_before += left if epochs is None else epochs
        length = total - base if own is None else own
        if not 0 < length <= total - base:
            raise BadInput(
                f'ctx.loop was to train {length} samples, but {total - base} of the total of '
                f'{total} are left.'
            )
        return length, total

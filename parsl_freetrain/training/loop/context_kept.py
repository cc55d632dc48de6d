"""The part of the context for what is saved besides models and optimizers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from parsl_freetrain.core.model.errors import BadInput

if TYPE_CHECKING:
    from parsl_freetrain.training.loop.fragment_run import FragmentRun

T = TypeVar('T')


class ContextOfKept:
    _run: 'FragmentRun'

    def ema(self, model: torch.nn.Module, decay: float) -> torch.nn.Module:
        """The exponential moving average of a model's parameters over the steps, which is saved
        with every checkpoint. Raises BadInput if it is called before :meth:`prepare` or after
        :meth:`loop`, for a model that was not prepared, or with a pipeline. Returns a copy of the
        model with the averaged parameters and the model's own buffers, in evaluation mode. In
        :func:`~parsl_freetrain.load_weights` its names begin with 'ema.'.

        Parameters
        ----------
        model
            A model that :meth:`prepare` has returned.
        decay
            Weight of the old average in each step, 0 to 1, for instance 0.999.
        """
        return self._run.add_average(model, decay)

    def keep(self, thing: T, name: str | None = None) -> T:
        """Save an object with every checkpoint, and load the last one into it. Raises BadInput if
        it has no such methods, its state has something other than tensors, numbers, texts and
        containers of them, or :meth:`prepare` was not called. Returns the object itself.

        Parameters
        ----------
        thing
            Has ``state_dict()`` and ``load_state_dict()``: an average that is no module, a metric,
            a replay buffer.
        name
            Its name in checkpoints; else it is named by its class and the order of the calls.
        """
        self._carried('keep').keep(thing, name)
        return thing

    def once(self, function: Callable[[], T]) -> T:
        """Call a function once in the whole training, and keep what it returns: for what stands
        between two loops and takes long, or is made of the model as it is then. Raises BadInput if
        it returns something else, in the body of the loop, or before :meth:`prepare`.

        Parameters
        ----------
        function
            Returns tensors, numbers, texts, containers of them, or a module. For a module it is
            called again in later fragments, and the state of the first one is loaded.
        """
        return self._carried('once').once(function)  # type: ignore[no-any-return]

    def warm_up(self, function: Callable[[], T]) -> T:
        """Call a function in which models initialise themselves, such as a first pass over a batch
        (lazy modules, ActNorm, variational inducing points), before their optimizer is made.

        Every fragment calls it, with the same random numbers on all ranks. What comes of it in the
        first fragment, on rank 0, is trained; later :meth:`prepare` loads the checkpoint over it.
        Raises BadInput if :meth:`prepare` was called before.
        """
        if self._run.model is not None:
            raise BadInput(
                'ctx.warm_up was called after ctx.prepare, which makes the models of all ranks the '
                'same and loads the checkpoint: call it before, with the model itself.'
            )
        return function()

    def _carried(self, method: str) -> Any:
        if self._run.model is None or self._run.in_body():
            raise BadInput(
                f'ctx.{method} was called before ctx.prepare or in the body of ctx.loop: call it '
                'after ctx.prepare and outside of the loop.'
            )
        return self._run.model.carried

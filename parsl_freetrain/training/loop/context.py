"""The context: the first argument of the user's function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.comm import world
from parsl_freetrain.training.data.loader_settings import LoaderData, LoaderSettings
from parsl_freetrain.training.data.sampler import Sampler
from parsl_freetrain.training.loop.context_kept import ContextOfKept
from parsl_freetrain.training.loop.evaluation import Measure
from parsl_freetrain.training.loop.fragment_run import FragmentRun
from parsl_freetrain.training.loop.loop_state import Phase
from parsl_freetrain.training.loop.loss import Loss
from parsl_freetrain.training.loop.preparing import shard_model_of
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.steps.mesh import all_gather


class FragmentContext(ContextOfKept):
    """One fragment as one of its ranks sees it: the first argument of the user's function.

    Attributes
    ----------
    trainer, fragment
        The trainer's name and the number of this fragment.
    rank, world_size, local_rank, nodes
        This rank among all ranks and on its node, the number of ranks, and the number of nodes.
    device
        The device of models and batches.
    samples
        Number of training samples so far, over all fragments and ranks.
    total_samples
        Number of samples to train; None until :meth:`loop` knows it, if the total is in epochs.
    epoch
        The current epoch, from 0.
    stopped
        Whether the fragment ended before the total.
    state
        The user's own dict, valid JSON; that of rank 0 is saved in every checkpoint.
    """

    def __init__(self, run: FragmentRun) -> None:
        order, place = run.order, run.parts.place
        self._run = run
        self.trainer, self.fragment, self.device = order.trainer, order.fragment, run.parts.device
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank, self.nodes = place.local_rank, place.nodes

    @property
    def spec(self) -> TrainingSpec:
        """The trainer's settings."""
        return self._run.order.spec

    @property
    def samples(self) -> int:
        return self._run.state.samples

    @property
    def total_samples(self) -> int | None:
        return self._run.state.total_samples

    @property
    def epoch(self) -> int:
        return self._run.state.epoch

    @property
    def metrics(self) -> dict[str, float]:
        """The last reported metrics; at the end of an epoch, means over its last global batch."""
        return dict(self._run.state.metrics)

    @property
    def epoch_means(self) -> dict[str, float]:
        """At the end of an epoch: the means over its samples of what was reported in the body."""
        if not self._run.state.reports.means.used:
            raise BadInput('ctx.epoch_means must be named in the trained function itself.')
        return dict(self._run.state.reports.means.values)

    @property
    def stopped(self) -> bool:
        return self._run.state.phase is Phase.STOPPED

    @property
    def state(self) -> dict[str, Any]:
        return self._run.user_state().values

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        if not isinstance(value, dict):
            how = "it is a dict: set its entries, as in ctx.state['name'] = value"
            raise BadInput(f'ctx.state was set to {value!r}; {how}.')
        self._run.user_state().values = value

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    @property
    def shape(self) -> Shape:
        """How the ranks share the work; without ``shapes``, each trains its own samples."""
        return self._run.division.shape

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as torch's DeviceMesh, with the dimensions
        :data:`~parsl_freetrain.core.model.types.MESH`; all ranks must ask for it at the same point.
        """
        return self._run.division.mesh

    def torch_distributed(self) -> ProcessGroup:
        """The group of all ranks, which becomes torch.distributed's default one. In
        reproducible mode it is that only until :meth:`prepare`, and exchanges in the loop's body
        are refused.
        """
        return world.show()

    def time_left(self) -> float:
        """Seconds until the nodes are taken away; infinite if unknown."""
        return self._run.checkpointer.timing.time_left()

    def should_stop(self) -> bool:
        """Whether there is a reason to stop. Only long work outside of the loop needs to ask."""
        return self._run.parts.inbox.stop_requested() or self._run.checkpointer.must_stop(1)

    def samples_lr(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]
    ) -> LambdaLR:
        """A learning rate scheduler by samples instead of steps, for a schedule that is the same
        for any number of nodes. Make it before :meth:`prepare`, which takes it, and call its
        ``step()`` once per batch, after the optimizer's.

        Parameters
        ----------
        optimizer
            The optimizer.
        factor
            The factor of the initial learning rate in a batch, as a function of the number of
            samples before it, by all ranks in all fragments.
        """
        return LambdaLR(optimizer, lambda _: factor(self._run.state.reached))

    def report(self, **metrics: float) -> None:
        """Report numbers by name; they are shown, recorded and saved with checkpoints.

        In the body of the loop, the mean over the samples of the last global batch counts;
        elsewhere, the value of rank 0. Raises TypeError if a value is not a number.
        """
        self._run.state.reports.put_all(metrics)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor of all ranks, with gradients, for a loss over all samples of a
        global batch (a contrastive one), which every rank then computes. Not for virtual shards.
        """
        run = self._run
        if run.model is None:
            raise BadInput('ctx.all_gather was called before ctx.prepare.')
        return all_gather(tensor, self.spec, run.division, run.model.steps, run.peers)

    def shard(
        self,
        model: torch.nn.Module,
        *,
        blocks: Sequence[type[torch.nn.Module]] = (),
        plan: Mapping[str, Any] | None = None,
        precision: Any = None,
        initialise: Callable[[torch.nn.Module], None] | None = None,
    ) -> torch.nn.Module:
        """Divide a model's parameters as :attr:`shape` says. Call it before the optimizer is made.

        Parameters and errors are those of
        :func:`parsl_freetrain.training.parallel.sharded.shard_model`.
        """
        how = {'blocks': blocks, 'plan': plan, 'precision': precision, 'initialise': initialise}
        return shard_model_of(self._run.parts, self._run.division, model, **how)

    def prepare(
        self,
        *things: Any,
        clip_grad_norm: float | None = None,
        find_unused_parameters: bool = False,
    ) -> Any:
        """Prepare models, optimizers and schedulers for :meth:`loop`, and load the last checkpoint
        into them. Raises BadInput if it is called twice, or with something else, or the checkpoint
        is of another model. Returns the prepared objects, in the order of the arguments. Use these
        from now on.

        Parameters
        ----------
        *things
            All trained models, optimizers, learning rate schedulers, gradient scalers, and
            AveragedModels. Also the DataLoader of the training, to iterate over in :meth:`epochs`.
        clip_grad_norm
            Clip the gradient of the global batch to this norm.
        find_unused_parameters
            As in DistributedDataParallel; not available in reproducible mode.
        """
        return self._run.prepare(things, clip_grad_norm, find_unused_parameters)

    def loop(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        micro_batch: int | None = None,
        accumulate: int = 1,
        epochs: float | None = None,
        samples: int | None = None,
        loss: Loss | None = None,
        shuffle: bool = True,
        sampler: Sampler | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> Iterator[Any]:
        """Batches from the current position to the total, in place of the loop over epochs and the
        DataLoader; within :meth:`epochs`, those of one epoch.

        When the fragment has to stop, the loop ends the function by an exception that is not an
        ``Exception``. Code after the loop runs when the total has been trained; when the function
        returns, the last checkpoint is written. A function may have several loops, one after the
        other; each but the last says how much it trains. Raises BadInput if the data differ between
        ranks or from those of the checkpoint, the body does what would be lost or trained wrongly,
        or the loops do not fit the total or the function.

        Parameters
        ----------
        dataset
            A map-style dataset: it has a length and an index. Or a stream, such as an
            IterableDataset, which every rank reads in the same order, to get its own samples of it.
            Or a DataLoader of one of these, in place of ``batch_size`` and the settings from
            ``shuffle`` on. Or several DataLoaders in a tuple, whose batches come together; the
            first one says what an epoch is.
        batch_size
            Samples in a global batch, over all ranks: what one optimizer step sees. In scaled mode,
            the number for the reference number of ranks.
        micro_batch
            Maximum number of samples in one pass of a rank. The body of the loop then runs several
            times for a global batch, and the gradients are added up.
        accumulate
            A global batch has so many times ``batch_size`` samples, in micro-batches. Each
            iteration calls ``optimizer.step()``, and the loss is not divided.
        epochs, samples
            How much this loop trains, if there are several; in the unit of the total.
        loss
            What the loss is over the samples of a batch: their 'mean', their 'sum', or a mean by
            what a function counts in a batch, such as its tokens. Default: 'mean', and a plain sum
            is refused.
        shuffle
            Whether each epoch has its own random order. A stream keeps its order.
        sampler
            In place of ``shuffle``, the order of all ranks' samples: indices, a sampler of torch
            (weighted, for instance), or a function that gives the indices of an epoch, from 0.
        drop_last
            Whether to leave out the last batch of an epoch if it is short.
        collate_fn, num_workers, worker_init_fn
            As in DataLoader. Workers stay for the whole fragment.
        """
        own = LoaderSettings(shuffle, collate_fn, num_workers, sampler, drop_last, worker_init_fn)
        how = batch_size, micro_batch, epochs, samples, own, loss, accumulate
        return self._run.begin_loop(dataset, *how)

    def before_step(self, function: Callable[[], object]) -> None:
        """Call a function once per global batch, on all ranks, when its gradient is known, and may
        be read and changed: before it is clipped and used.
        """
        self._run.hooks.add('before_step', function, in_body=self._run.in_body())

    def after_step(self, function: Callable[[], object]) -> None:
        """Call a function once per global batch, on all ranks, after the step of the optimizers, if
        ``on_nan`` has not skipped it. There, parameters may be changed, on all ranks alike.
        """
        self._run.hooks.add('after_step', function, in_body=self._run.in_body())

    def each_epoch(self, function: Callable[[], object]) -> None:
        """Call a function at the end of each epoch, once, on all ranks, after the step of its last
        global batch. It belongs to the epoch: a checkpoint is written before it or after it.
        """
        self._run.hooks.add('each_epoch', function, in_body=self._run.in_body())

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left, for a loop over epochs around :meth:`loop`::

            for epoch in ctx.epochs():
                for batch in ctx.loop(loader):
                    ...
                scheduler.step()

        What is done behind ``ctx.loop`` belongs to the end of the epoch, as with
        :meth:`each_epoch`: once, on all ranks; ``break``, on all ranks alike, ends the training. A
        fragment that begins within an epoch repeats what is before ``ctx.loop``. Raises BadInput if
        it is called twice, before :meth:`prepare` or after :meth:`loop`, or with
        ``on_nan='rollback'``; if an epoch has not exactly one ``ctx.loop``, with the same data in
        each, or what is saved changes before it.
        """
        return iter(self._run.begin_epochs())

    def finish_early(self, reason: str) -> None:
        """End the training before the total; the trainer counts as finished. One rank suffices. At
        the end of an epoch it ends there, elsewhere after this or one of the next global batches.
        """
        self._run.finish_early(reason or 'no reason was given')

    def checkpoint(self, best: float | None = None) -> None:
        """Write a checkpoint at the end of this epoch. Raises BadInput if it is not called at the
        end of an epoch.

        Parameters
        ----------
        best
            The value by which the best of these checkpoints is chosen and kept: the smallest, or
            with ``Retention(mode='max')`` the largest. It is the checkpoint's metric 'best'.
        """
        self._run.state.want_checkpoint(best)

    def evaluate(
        self,
        model: torch.nn.Module,
        dataset: Any,
        measure: Measure,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        gradients: bool = False,
    ) -> dict[str, float]:
        """Evaluate a model on a dataset. All ranks must call this, and share the work; the result
        is the same for any number of them, and on all ranks.

        The model is in evaluation mode. If the fragment has to stop meanwhile, the next one repeats
        all that is done at the end of that epoch. Raises BadInput if it is called in the body of
        the loop, the model is divided into stages, or ``measure`` returns something else. Returns,
        by metric, the mean over all samples, or the sum divided by the number.

        Parameters
        ----------
        model
            Any model; of one that :meth:`prepare` has wrapped, the model itself is evaluated.
        dataset
            A map-style dataset.
        measure
            A function of the model and a batch, which returns by metric one value per sample, as a
            tensor of shape (batch size,), or a pair (sum, number).
        batch_size
            Number of samples in a batch of one rank.
        collate_fn, num_workers
            As in DataLoader.
        gradients
            Whether ``measure`` computes gradients, such as forces from an energy.
        """
        data = LoaderData(
            dataset=dataset, batch_size=batch_size, collate_fn=collate_fn, num_workers=num_workers
        )
        return self._run.evaluate(model, data, measure, gradients)

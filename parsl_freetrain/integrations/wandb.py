"""Metrics of trainers in Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.integrations.metric_logger import LoggedTraining, OpenLog

with needs('parsl_freetrain.integrations.wandb'):
    import wandb


class WandbLogger:
    """A logger for ``Recording(loggers=[...])``. A training is one run of W&B, whose steps
    are samples.

    Parameters
    ----------
    **options
        Further arguments of ``wandb.init``, such as ``project``, ``entity``, ``dir`` and ``mode``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def open(self, training: LoggedTraining) -> OpenLog:
        options = {'project': 'parsl-freetrain', 'name': training.trainer, **self.options}
        return _Log(
            wandb.init(
                id=training.id,
                resume='allow',
                reinit='create_new',  # beside runs of other trainers
                config=dict(training.settings),
                **options,
            )
        )


class _Log:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, samples: int, at: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=samples)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state == 'failed'))

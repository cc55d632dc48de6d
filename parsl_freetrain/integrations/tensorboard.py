"""Metrics of trainers in TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.integrations.metric_logger import LoggedTraining, OpenLog

with needs('parsl_freetrain.integrations.tensorboard'):
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """A logger for ``Recording(loggers=[...])``.

    Parameters
    ----------
    folder
        Each training has a folder in it; ``tensorboard --logdir`` takes this one.
    """

    def __init__(self, folder: str | Path = 'tensorboard') -> None:
        self.folder = Path(folder).absolute()

    def open(self, training: LoggedTraining) -> OpenLog:
        return _Log(self.folder / training.id, training)


class _Log:
    def __init__(self, folder: Path, training: LoggedTraining) -> None:
        # A process that was killed may have written more than it could note.
        self._writer = SummaryWriter(str(folder), purge_step=training.samples + 1)

    def log(self, samples: int, at: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, samples, walltime=at)

    def close(self, state: str) -> None:
        self._writer.close()

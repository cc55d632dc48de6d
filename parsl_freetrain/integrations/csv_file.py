"""Metrics of trainers in CSV files."""

import csv
from collections.abc import Mapping
from pathlib import Path

from parsl_freetrain.host import files
from parsl_freetrain.integrations.metric_logger import LoggedTraining, OpenLog

COLUMNS = ['samples', 'at', 'metric', 'value']


class CsvLogger:
    """A logger for ``Recording(loggers=[...])``: a file ``TRAINER.csv`` for each training, with the
    columns samples, at (seconds since the epoch), metric and value, and no row twice.

    A file that the function writes itself, at the end of an epoch for instance, gets rows again
    whenever a fragment repeats what a kill has lost.

    Parameters
    ----------
    folder
        Where the files are written, by the submitting process.
    """

    def __init__(self, folder: str | Path = 'metrics') -> None:
        self.folder = Path(folder).absolute()

    def open(self, training: LoggedTraining) -> OpenLog:
        return _Log(self.folder / f'{training.trainer}.csv', training.samples)


class _Log:
    def __init__(self, path: Path, samples: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [','.join(COLUMNS)]
        if samples >= 0 and path.exists():
            # A process that was killed may have written more than it could note.
            for line in path.read_text().splitlines()[1:]:
                at, comma, _ = line.partition(',')
                if comma and at.isdigit() and int(at) <= samples:
                    kept.append(line)
        files.replace(path, '\n'.join([*kept, '']).encode())
        self._path = path

    def log(self, samples: int, at: float, metrics: Mapping[str, float]) -> None:
        with self._path.open('a', newline='') as file:
            csv.writer(file, lineterminator='\n').writerows(
                [samples, f'{at:.3f}', name, repr(value)] for name, value in metrics.items()
            )

    def close(self, state: str) -> None:
        """Each row is in the file already."""

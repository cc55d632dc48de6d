"""Metrics of trainers in MLflow."""

from collections.abc import Mapping
from typing import Any

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.integrations.metric_logger import LoggedTraining, OpenLog

with needs('parsl_freetrain.integrations.mlflow'):
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag

ID, SAMPLES = 'freetrain.training', 'freetrain.samples'  # tags of a run of MLflow

STATUS = {'finished': 'FINISHED', 'failed': 'FAILED', 'cancelled': 'KILLED'}


class MLflowLogger:
    """A logger for ``Recording(loggers=[...])``. A training is one run of MLflow.

    Parameters
    ----------
    experiment
        The name of the experiment; it is made if there is none.
    tracking_uri
        As in MLflow; None: what MLflow's own settings say.
    """

    def __init__(
        self, experiment: str = 'parsl-freetrain', tracking_uri: str | None = None
    ) -> None:
        self.experiment, self.tracking_uri = experiment, tracking_uri

    def open(self, training: LoggedTraining) -> OpenLog:
        client = MlflowClient(self.tracking_uri)
        known = client.get_experiment_by_name(self.experiment)
        number = known.experiment_id if known else client.create_experiment(self.experiment)
        found = client.search_runs([number], f"tags.`{ID}` = '{training.id}'")
        if found:
            client.update_run(found[0].info.run_id, 'RUNNING')
            return _Log(client, found[0].info.run_id, found[0].data)
        run = client.create_run(number, run_name=training.trainer, tags={ID: training.id})
        for name, value in training.settings.items():
            client.log_param(run.info.run_id, name, value)
        return _Log(client, run.info.run_id, run.data)


class _Log:
    def __init__(self, client: Any, run: str, data: Any) -> None:
        self._client, self._run = client, run
        self._logged = int(data.tags.get(SAMPLES, -1))
        self._last = {
            name
            for name in data.metrics
            if client.get_metric_history(run, name)[-1].step == self._logged
        }

    def log(self, samples: int, at: float, metrics: Mapping[str, float]) -> None:
        # A process that was killed may have logged more than it could note.
        if samples < self._logged:
            return
        found = [
            Metric(name, value, int(1000 * at), samples)
            for name, value in metrics.items()
            if samples > self._logged or name not in self._last
        ]
        self._client.log_batch(self._run, found, tags=[RunTag(SAMPLES, str(samples))])

    def close(self, state: str) -> None:
        self._client.set_terminated(self._run, STATUS.get(state, 'SCHEDULED'))

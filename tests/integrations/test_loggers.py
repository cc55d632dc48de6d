"""Loggers of other libraries: one run for a training that several processes have logged."""

import csv
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.integrations.csv_file import CsvLogger
from parsl_freetrain.integrations.metric_logger import LoggedTraining, MetricLogger
from tests.support.programs import run_to_end

NET = LoggedTraining('net-abc', 'net', {'mode': 'reproducible', 'min_nodes': 1})
OTHER = LoggedTraining('other-abc', 'other')


def log_twice(logger: MetricLogger) -> None:
    """Two trainings at once, then one of them again by a process that knows up to 20 samples."""
    one, other = logger.open(NET), logger.open(OTHER)
    for samples in (10, 20, 30):
        one.log(samples, 1e9 + samples, {'loss': 1 / samples, 'error': 0.5})
        other.log(samples, 1e9 + samples, {'loss': 2 / samples})
    one.close('interrupted')
    other.close('failed')
    again = logger.open(LoggedTraining('net-abc', 'net', NET.settings, samples=20))
    for samples in (30, 40):
        again.log(samples, 1e9 + samples, {'loss': 1 / samples})
    again.close('finished')


def test_csv(tmp_path: Path) -> None:
    log_twice(CsvLogger(tmp_path))
    (tmp_path / 'net.csv').open('a').write('50,1')  # torn by a kill
    CsvLogger(tmp_path).open(LoggedTraining('net-abc', 'net', samples=40)).close('finished')
    with (tmp_path / 'net.csv').open(newline='') as file:
        rows = [(int(row['samples']), row['metric'], row['value']) for row in csv.DictReader(file)]
    assert [samples for samples, name, _ in rows if name == 'loss'] == [10, 20, 30, 40]
    assert (30, 'loss', repr(1 / 30)) in rows and (20, 'error', '0.5') in rows
    assert {path.name for path in tmp_path.iterdir()} == {'net.csv', 'other.csv'}
    # A training that begins anew begins a new file.
    CsvLogger(tmp_path).open(OTHER).close('finished')
    assert (tmp_path / 'other.csv').read_text() == 'samples,at,metric,value\n'


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip('tensorboard', reason='needs the extra tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from parsl_freetrain.integrations.tensorboard import TensorBoardLogger

    log_twice(TensorBoardLogger(tmp_path))
    shown = EventAccumulator(str(tmp_path / 'net-abc'))
    shown.Reload()
    assert [event.step for event in shown.Scalars('loss')] == [10, 20, 30, 40]
    assert [event.wall_time for event in shown.Scalars('error')] == [1e9 + 10, 1e9 + 20]
    assert {folder.name for folder in tmp_path.iterdir()} == {'net-abc', 'other-abc'}


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('mlflow', reason='needs the extra mlflow')
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')  # a database needs SQLAlchemy and alembic
    monkeypatch.setenv('MLFLOW_DISABLE_TELEMETRY', 'true')
    from mlflow import MlflowClient

    from parsl_freetrain.integrations.mlflow import MLflowLogger

    where = (tmp_path / 'mlruns').as_uri()
    log_twice(MLflowLogger('mine', where))
    client = MlflowClient(where)
    found = client.search_runs([client.get_experiment_by_name('mine').experiment_id])
    runs: dict[str, Any] = {run.info.run_name: run for run in found}
    assert {n: run.info.status for n, run in runs.items()} == {'net': 'FINISHED', 'other': 'FAILED'}
    history = client.get_metric_history(runs['net'].info.run_id, 'loss')
    assert [(one.step, one.value) for one in history] == [(s, 1 / s) for s in (10, 20, 30, 40)]
    assert history[0].timestamp == 1000 * (10**9 + 10)
    assert runs['net'].data.params == {'mode': 'reproducible', 'min_nodes': '1'}


# W&B starts a service that ends with its process.
IN_WANDB = """
import sys
from parsl_freetrain.integrations.wandb import WandbLogger
from tests.integrations.test_loggers import log_twice
log_twice(WandbLogger(mode='offline', dir=sys.argv[1]))
"""


def records(content: bytes) -> Iterator[bytes]:
    """Those of a file of W&B of one block, in the format of LevelDB's logs."""
    at = 7
    while at < len(content):
        _, length, kind = struct.unpack_from('<IHB', content, at)
        assert kind == 1
        yield content[at + 7 : at + 7 + length]
        at += 7 + length


def test_wandb(tmp_path: Path) -> None:
    """Offline, a file for each process; W&B joins a run by its id, and drops steps that it has."""
    pytest.importorskip('wandb', reason='needs the extra wandb')
    from wandb.proto import wandb_internal_pb2

    quiet = {'HOME': str(tmp_path), 'WANDB_SILENT': 'true', 'WANDB_ERROR_REPORTING': 'false'}
    run_to_end([sys.executable, '-c', IN_WANDB, tmp_path], check=True, more_env=quiet)
    steps: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(tmp_path.glob('wandb/offline-run-*/*.wandb')):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof('record_type') == 'history':
                row = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                steps.setdefault(file.stem, []).append((row['_step'], row['loss']))
    assert steps == {
        'run-net-abc': [(s, 1 / s) for s in (10, 20, 30, 30, 40)],
        'run-other-abc': [(s, 2 / s) for s in (10, 20, 30)],
    }

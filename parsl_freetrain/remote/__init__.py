"""Remote training: submit trainers through Globus Compute to an endpoint with FreeTrainEngine."""

from __future__ import annotations

from parsl_freetrain.remote.client import FreeTrainClient
from parsl_freetrain.remote.remote_future import RemoteTraining

__all__ = ['FreeTrainClient', 'RemoteTraining']

"""What is sent of a trainer: its order, and its function and arguments."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.fragment.payload import pack
from parsl_freetrain.executor.globus.protocol import TRAIN, Order, versions_here
from parsl_freetrain.executor.globus.requirements import modules_needed
from parsl_freetrain.executor.trainer.trainer_record import check_name
from parsl_freetrain.remote.endpoint_connection import LARGEST_PAYLOAD


def order_of(
    app: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], trainer_name: str | None
) -> tuple[Order, str]:
    """The order that starts a trainer, and its payload in base64. Raises BadInput if ``app`` is no
    trainer, an argument is a future, or it is too large to send.
    """
    if not isinstance(app, FreeTrainApp):
        raise BadInput(
            f'FreeTrainClient sends trainers, and {getattr(app, "__name__", app)!r} is a plain '
            'function: decorate it with @freetrain_app, or send it with '
            'globus_compute_sdk.Executor(endpoint_id=...), also to the same endpoint.'
        )
    name = app.name if trainer_name is None else trainer_name
    check_name(name)
    if any(isinstance(value, Future) for value in (*args, *kwargs.values())):
        raise BadInput(
            f'Trainer {name!r} cannot be sent: one of its arguments is a future; give its result().'
        )
    payload = pack(app.function, args, dict(kwargs), name)
    if len(payload) > LARGEST_PAYLOAD:
        raise BadInput(
            f'Trainer {name!r} cannot be sent: its function and arguments have '
            f'{len(payload)} bytes, and Globus Compute takes {LARGEST_PAYLOAD}; put data into '
            'files at the endpoint, and pass their paths.'
        )
    order = Order(
        TRAIN,
        name,
        secrets.token_hex(8),
        versions=versions_here(),
        modules=modules_needed(app.function, payload),
        spec=app.spec,
        identity=app.identity(),
    )
    return order, base64.b64encode(payload).decode()

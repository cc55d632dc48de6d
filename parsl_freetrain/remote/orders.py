"""What a client sends to an endpoint, and what comes back, as msgpack; only the run unpickles."""

import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import field

import parsl_freetrain
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint, Progress
from parsl_freetrain.training.spec.training import TrainingSpec


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client wants, answered after ``hold_s`` seconds or at an end."""

    verb: Literal['train', 'look', 'cancel']
    checkpoint_dir: str = ''
    settings: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = ''
    request: str = ''
    hold_s: float = 0.0
    versions: Mapping[str, str | None] = field(default_factory=dict)
    spec: TrainingSpec | None = None
    payload: bytes = b''


class TrainerStatus(msgspec.Struct, frozen=True):
    """A trainer of this request; ``sentence``: what is wrong, ``refused``: by the user's input."""

    request: str
    state: str = 'sent'
    progress: Progress = Progress()
    checkpoint: Checkpoint | None = None
    sentence: str = ''
    refused: bool = False


class OrderAnswer(msgspec.Struct, frozen=True):
    refusal: str = ''
    versions: Mapping[str, str | None] = field(default_factory=dict)
    trainers: Mapping[str, TrainerStatus] = field(default_factory=dict)


Kind = TypeVar('Kind', Order, OrderAnswer, TrainerStatus)


def decoded(content: Any, kind: type[Kind]) -> Kind:
    """What was sent. Raises BadInput if it is not understood, or an order was refused."""
    try:
        found = msgspec.msgpack.decode(content, type=kind)
    except (ValueError, TypeError) as error:
        raise BadInput(
            f'parsl-freetrain {parsl_freetrain.__version__} does not understand this '
            f'{kind.__name__.lower()}: install the same version on both ends ({error}).'
        ) from error
    if isinstance(found, OrderAnswer) and found.refusal:
        raise BadInput(found.refusal)
    return found


def _run_or_join(order: bytes, python: str = '') -> bytes:
    """Start the run of a checkpoint folder, or join it: an order in, an answer out, as msgpack."""
    import subprocess
    import sys

    command = [python or sys.executable, '-m', 'parsl_freetrain.remote.endpoint']
    done = subprocess.run(command, input=order, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors='replace')[-2000:])
    return done.stdout


# By value: the endpoint's own Python need not have this package (ALCF's has an old Parsl).
run_or_join = types.FunctionType(_run_or_join.__code__, {}, 'run_or_join', ('',))
run_or_join.__module__, run_or_join.__doc__ = '__main__', _run_or_join.__doc__

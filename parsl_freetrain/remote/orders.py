"""What a client sends to an endpoint, and what comes back, as msgpack; only the run unpickles."""

from __future__ import annotations

import importlib.metadata
import platform
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import field

import parsl_freetrain
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.trainer.future import Progress
from parsl_freetrain.training.spec.training import TrainingSpec

OK, BAD_INPUT, FAILED, CANCELLED = 'ok', 'bad-input', 'failed', 'cancelled'
COMPARED = {'python': 2, 'parsl-freetrain': 3, 'cloudpickle': 1, 'torch': 2}
"""Number of leading parts of each version that must be equal on both ends."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """'train', 'look', 'cancel' or 'versions', answered after ``hold_s`` seconds or at an end."""

    verb: str
    checkpoint_dir: str = ''
    settings: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = ''
    request: str = ''
    hold_s: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    spec: TrainingSpec | None = None
    payload: bytes = b''


class TrainerStatus(msgspec.Struct, frozen=True):
    """A trainer of this request; ``end``: how it ended (or ''), ``sentence``: what is wrong."""

    request: str
    state: str = 'sent'
    progress: Progress = Progress()
    checkpoint: Checkpoint | None = None
    end: str = ''
    sentence: str = ''


class OrderAnswer(msgspec.Struct, frozen=True):
    refusal: str = ''
    versions: Mapping[str, str] = field(default_factory=dict)
    trainers: Mapping[str, TrainerStatus] = field(default_factory=dict)


Kind = TypeVar('Kind', Order, OrderAnswer, TrainerStatus)


def decoded(content: Any, kind: type[Kind]) -> Kind:
    """What was sent. Raises BadInput if this version does not understand it."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (ValueError, TypeError) as error:
        raise BadInput(
            f'parsl-freetrain {parsl_freetrain.__version__} does not understand this '
            f'{kind.__name__.lower()}: install the same version on both ends ({error}).'
        ) from error


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


def versions_here() -> dict[str, str]:
    """Versions of the packages that both ends need, without those that are not installed."""
    found = {'python': platform.python_version(), 'parsl-freetrain': parsl_freetrain.__version__}
    for name in COMPARED.keys() - found.keys():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Comparison:
    name: str
    here: str
    there: str
    fits: bool


def compare(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[Comparison, ...]:
    """Versions ``here`` (a client's) and ``there``; what the client lacks does not count."""
    found = []
    for name, count in COMPARED.items():
        mine, theirs = here.get(name, '-'), there.get(name, '-')
        fits = mine == '-' or mine.split('.')[:count] == theirs.split('.')[:count]
        found.append(Comparison(name, mine, theirs, fits))
    return tuple(found)

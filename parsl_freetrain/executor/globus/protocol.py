"""Orders that a FreeTrainClient sends to a Globus Compute endpoint, and the answers. Both are JSON.

An order travels in the resource specification of a Globus Compute task. So versions can be compared
before any part of the task is deserialised. Only a trainer's function is not JSON; the endpoint
passes it on to the nodes without deserialising it.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import field

import parsl_freetrain
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.trainer.future import Progress
from parsl_freetrain.training.spec.training import TrainingSpec

ORDER = 'freetrain_order'  # key of the resource specification that marks an order's task
VERSIONS, TRAIN, WAIT, LOOK, CANCEL = 'versions', 'train', 'wait', 'look', 'cancel'
OK, BAD_INPUT, FAILED, CANCELLED, INTERRUPTED, UNKNOWN = (
    'ok',
    'bad-input',
    'failed',
    'cancelled',
    'interrupted',
    'unknown',
)

COMPARED = {'python': 2, 'parsl-freetrain': 3, 'parsl': 2, 'dill': 2, 'cloudpickle': 1, 'torch': 2}
"""Number of leading parts of each version that must be equal on both ends."""


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order.

    Attributes
    ----------
    verb
        'versions', 'train' (answered when the trainer has ended), 'wait' (the same, for a known
        trainer), 'look' or 'cancel'.
    trainer
        The trainer's name; empty: 'look' returns all trainers.
    request
        Identifies the submission of a trainer. If the same request is sent again, it finds the
        trainer that it has started.
    again
        Whether the trainer may have begun already. If so, its checkpoints are used, whatever
        ``resume`` says.
    versions
        The client's versions; see :func:`versions_here`.
    modules
        Top-level modules that the function needs.
    spec
        What to train, and how; None for other verbs.
    identity
        As in :func:`parsl_freetrain.training.checkpoint.folder_claim.claim`.
    """

    verb: str
    trainer: str = ''
    request: str = ''
    again: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    spec: TrainingSpec | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: Any) -> Order:
        """Parse an order. Raises BadInput if this version does not know the order, or its settings
        cannot be used.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, TypeError) as error:
            raise BadInput(
                f'The endpoint, with parsl-freetrain {parsl_freetrain.__version__}, does '
                f'not understand this order: install the same version on both ends ({error}).'
            ) from error


class TrainerStatus(msgspec.Struct, frozen=True):
    """A trainer at the endpoint; ``request`` as in :class:`Order`."""

    request: str
    state: str
    progress: Progress
    checkpoint: Checkpoint | None = None


class Answer(msgspec.Struct, frozen=True):
    """An answer.

    Attributes
    ----------
    kind
        'ok', 'bad-input', 'failed', 'cancelled', 'interrupted' or 'unknown'.
    sentence
        For the user.
    versions
        The endpoint's, to 'versions'.
    trainers
        By name, to 'look'.
    checkpoint
        Of a trainer that has ended. Its path belongs to the endpoint's file system.
    """

    kind: str
    sentence: str = ''
    versions: Mapping[str, str] = field(default_factory=dict)
    trainers: Mapping[str, TrainerStatus] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None

    def to_document(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_document(cls, document: Any) -> Answer:
        """Raises BadInput if it is no answer of an endpoint with this version."""
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise BadInput(
                f'The endpoint answered what parsl-freetrain {parsl_freetrain.__version__} does '
                f'not understand: install the same version on both ends ({error}).'
            ) from error


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
    """One line of a comparison; ``fits``: the versions are equal or compatible."""

    name: str
    here: str
    there: str
    fits: bool


def compare(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[Comparison, ...]:
    """Compare the versions of a client (``here``) with those of an endpoint (``there``).

    Packages that the client lacks are not compared. For instance, it needs torch only if its user's
    module imports it.
    """
    return tuple(
        Comparison(
            name,
            here.get(name, '-'),
            there.get(name, '-'),
            name not in here
            or here[name].split('.')[:count] == there.get(name, '').split('.')[:count],
        )
        for name, count in COMPARED.items()
    )


def refuse_differences(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise BadInput with a list of all differences if client and endpoint do not fit together."""
    if wrong := [c for c in compare(here, there) if not c.fits]:
        differences = ', '.join(
            f'{c.name} is {c.here} here and {c.there} at the endpoint' for c in wrong
        )
        raise BadInput(
            f'This computer and the endpoint do not fit together: {differences}; install '
            "the endpoint's versions here."
        )

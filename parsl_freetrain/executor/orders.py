"""Orders: what a FreeTrainClient asks of a Globus Compute endpoint, and the answers; JSON both ways.

An order travels in the resource specification of a Globus Compute task, so that versions can be compared before anything of the task
is deserialised. Only the function of a trainer is more than JSON; the endpoint passes it on to the nodes unopened.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import parsl_freetrain
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.words import Checkpoint, Efficiency, ScalingCurve, Shape, Trainer
from parsl_freetrain.executor.trainers import Terms
from parsl_freetrain.training.retention import Retention
from parsl_freetrain.training.scaled import Scaled

ORDER = 'freetrain_order'   # key of the resource specification that marks an order's task
VERSIONS, TRAIN, WAIT, LOOK, CANCEL = 'versions', 'train', 'wait', 'look', 'cancel'
OK, BAD_INPUT, FAILED, CANCELLED, INTERRUPTED, UNKNOWN = 'ok', 'bad-input', 'failed', 'cancelled', 'interrupted', 'unknown'

COMPARED = {'python': 2, 'parsl-freetrain': 3, 'parsl': 2, 'dill': 2, 'cloudpickle': 1, 'torch': 2}
"""How many of the numbers of its version must be the same on both ends."""

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Order:
    """What is asked.

    Attributes
    ----------
    verb
        'versions', 'train' (answered when the trainer is over), 'wait' (the same, for one that is known), 'look' or 'cancel'.
    trainer
        Which trainer; an empty text asks 'look' for all.
    request
        Tells submissions of trainers from each other; one that is sent again finds the trainer that it has started.
    again
        Whether the trainer may have begun already: its checkpoints are used then, whatever ``resume`` says.
    versions
        Of the client; see :func:`versions_here`.
    modules
        Top-level modules that the function needs.
    description
        What :func:`describe` gives.
    """

    verb: str
    trainer: str = ''
    request: str = ''
    again: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    description: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: Any) -> Order:
        """The order in ``text``.

        Raises
        ------
        BadInput
            If it is not one that this version knows.
        """
        try:
            fields = json.loads(text)
            order = cls(**{**fields, 'modules': tuple(fields.get('modules', ()))})
        except (ValueError, TypeError, AttributeError) as error:
            raise BadInput(f'The endpoint, with parsl-freetrain {parsl_freetrain.__version__}, does not understand this order: '
                           f'install the same version on both ends.') from error
        return order


def describe(trainer: Trainer, terms: Terms, identity: Mapping[str, Any], resume: str | None) -> dict[str, Any]:
    """What an endpoint has to know of a trainer besides its function; plain JSON.

    Parameters
    ----------
    identity, resume
        As :func:`parsl_freetrain.training.store.claim` takes them; ``resume`` None: as the endpoint's executor says.
    """
    return {'trainer': asdict(trainer), 'terms': {k: v for k, v in asdict(terms).items() if k != 'store'}, 'identity': dict(identity),
            'resume': resume}


def described(description: Mapping[str, Any], store: str) -> tuple[Trainer, Terms]:
    """The trainer that :func:`describe` has described, with its checkpoints in folder ``store``.

    Raises
    ------
    BadInput
        If there is anything in it that cannot be used.
    """
    try:
        trainer, terms = dict(description['trainer']), dict(description['terms'])
        curve, efficiency = trainer.pop('curve'), trainer.pop('efficiency')
        return (Trainer(curve=ScalingCurve(tuple(curve['nodes']), tuple(curve['rate'])) if curve else None,
                        efficiency=Efficiency(tuple(efficiency['nodes']), tuple(efficiency['value'])) if efficiency else None,
                        sizes=tuple(trainer.pop('sizes')), stated_costs=tuple(trainer.pop('stated_costs')), **trainer),
                Terms(store=store, keep_checkpoints=Retention(**terms.pop('keep_checkpoints')), scaled=Scaled(**terms.pop('scaled')),
                      shapes={int(nodes): Shape(**shape) for nodes, shape in terms.pop('shapes').items()}, **terms))
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f'The description of the trainer cannot be used ({type(error).__name__}: {error}): '
                       f'install the same version of parsl-freetrain on both ends.') from error


def answer(kind: str, sentence: str = '', **more: Any) -> Answer:
    """What has become of an order."""
    return {'kind': kind, 'sentence': sentence, **more}


def checkpoint_of(found: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint handle in an answer; its path is one of the endpoint's file system."""
    return Checkpoint(**found)


def versions_here() -> dict[str, str]:
    """Versions of what both ends need, without what is not installed."""
    found = {'python': platform.python_version(), 'parsl-freetrain': parsl_freetrain.__version__}
    for name in COMPARED.keys() - found.keys():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Comparison:
    """One line of a comparison; ``fits`` says whether the difference, if any, can do no harm."""

    name: str
    here: str
    there: str
    fits: bool


def compare(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[Comparison, ...]:
    """Compare the versions of a client (``here``) with those of an endpoint (``there``).

    What the client lacks is not compared: it needs torch, for instance, only if its user's module imports it.
    """
    return tuple(
        Comparison(name, here.get(name, '-'), there.get(name, '-'),
                   name not in here or here[name].split('.')[:count] == there.get(name, '').split('.')[:count])
        for name, count in COMPARED.items())


def refuse_differences(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise BadInput, with all differences in its sentence, if client and endpoint do not fit together."""
    if wrong := [c for c in compare(here, there) if not c.fits]:
        differences = ', '.join(f'{c.name} is {c.here} here and {c.there} at the endpoint' for c in wrong)
        raise BadInput(f"This computer and the endpoint do not fit together: {differences}; install the endpoint's versions here.")

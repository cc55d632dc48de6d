"""What a checkpoint must lead to: digests of its state and of the step that follows, beside it.

They are in a folder of their own, by fragment and samples, since a state may be left in memory
before it is a checkpoint. One that is missing or torn says nothing about the checkpoint.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from parsl_freetrain.host.files import make_dir, replace
from parsl_freetrain.training.checkpoint.directories import names

log = logging.getLogger(__name__)

_FOLDER, _KEPT = 'next-steps', 20
Digests = dict[str, int]


class NextStep(msgspec.Struct, frozen=True):
    """Digests of a state, by name of a parameter or buffer, and of the step that follows."""

    device: str  #: the kind of processor or accelerator that computed it
    batch: int  #: a digest of the numbers of the samples of the next global batch; 0: unknown
    state: Digests  #: parameters and buffers before the step
    #: gradients, after: the summed gradients of the step, and parameters and buffers behind it;
    #: None: the step was not computed.
    gradients: Digests | None = None
    after: Digests | None = None
    reports: dict[str, float] = {}  #: the metrics that the step reported


def write(store: Path, samples: int, fragment: int, what: NextStep) -> None:
    """Write it for the state of a fragment at a number of samples, and remove old ones. Without
    room for it, the next fragment cannot verify how it goes on, which is logged.
    """
    folder = store / _FOLDER
    try:
        make_dir(folder)
        replace(folder / _name(samples, fragment), msgspec.msgpack.encode(what), durable=False)
        for name in sorted(names(folder))[:-_KEPT]:
            (folder / name).unlink(missing_ok=True)
    except OSError:
        log.warning('The digests of the next step are not kept in %s', folder, exc_info=True)


def read(store: Path, samples: int, fragment: int) -> NextStep | None:
    """What :func:`write` wrote; None: there is none."""
    try:
        content = (store / _FOLDER / _name(samples, fragment)).read_bytes()
        return msgspec.msgpack.decode(content, type=NextStep)
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def _name(samples: int, fragment: int) -> str:
    return f'f{fragment:06d}-{samples:012d}'  # in the order in which they are made

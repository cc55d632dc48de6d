"""What a checkpoint must lead to: digests of its state and of the step that follows, beside it by
fragment and samples. One that is missing or torn says nothing about the checkpoint.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from parsl_freetrain.host.files import make_dir, read_regular, replace
from parsl_freetrain.training.checkpoint.directories import names

log = logging.getLogger(__name__)

FOLDER, _KEPT, _LARGEST = 'next-steps', 20, 1 << 28  # bytes
Digests = dict[str, int]
_ROUNDING, _KERNELS = 1e-5, 0.03  # relative: added up in one order, or in any (atomic, autotuned)
_CHANGES = 0.01


class Measured(msgspec.Struct, frozen=True):
    """Rank 0's part of a step in throughput mode. ``layout``: what its bits depend on: ranks,
    whether on CPUs, whether by deterministic algorithms, parts of a batch, threads, processor.
    """

    layout: list[int]
    loss: float
    norms: dict[str, float]  #: of gradients, by parameter
    changes: dict[str, float]  #: of parameters' squared norms, on CPUs
    rates: list[float]  #: learning rates

    def difference(self, then: 'Measured') -> str:
        """What differs from the other's by more than rounding, if they can be compared."""
        if self.layout != then.layout:
            return ''
        ranks, cpu, fixed = self.layout[:3]
        most = _ROUNDING if cpu or fixed else _KERNELS
        for rate, before in zip(self.rates, then.rates, strict=False):
            if not math.isclose(rate, before, rel_tol=most):
                return f'a learning rate is {rate:.7g} in the next step, and was {before:.7g}'
        differ = repr(self.loss) != repr(then.loss)
        loss = differ and not math.isclose(self.loss, then.loss, rel_tol=most)
        gradient = _apart(self.norms, then.norms, most)
        # Where much cancels out, rounding is large in one of both; two ranks have but one order.
        exact = cpu and ranks <= 2
        if loss and (exact or gradient):
            return f'the loss of the next step is {self.loss:.7g}, and was {then.loss:.7g}'
        if exact and gradient:
            return f'the gradient of {gradient} has another norm in the next step'
        changed = _apart(self.changes, then.changes, _CHANGES) if exact else ''
        return f'the next step gives {changed} another value' if changed else ''


def _apart(now: Mapping[str, float], then: Mapping[str, float], most: float) -> str:
    """The name whose numbers differ most; empty: together they do not by more than a part."""
    off = {name: abs(one - then.get(name, 0.0)) for name, one in now.items()}
    apart = math.hypot(*off.values()) > most * math.hypot(*then.values())
    return max(off, key=off.__getitem__) if apart else ''


class NextStep(msgspec.Struct, frozen=True):
    """Digests of a state, by name of a parameter or buffer, and of the step that follows."""

    device: str  #: the kind of processor or accelerator that computed it
    batch: int  #: a digest of the numbers of the samples of the next global batch; 0: unknown
    state: Digests  #: parameters and buffers before the step
    #: gradients, after: of the step, and what it makes; None: it was not computed.
    gradients: Digests | None = None
    after: Digests | None = None
    reports: dict[str, float] = {}  #: the metrics that the step reported
    #: If it was not computed since a rank was lost: the others' gradients, by their virtual shards.
    parts: dict[str, Digests] = {}
    measured: Measured | None = None
    numbers: dict[str, float] = {}  #: the function's variables before its loop


def write(
    store: Path, samples: int, fragment: int, it: NextStep, of: str = '', *, all_kept: bool = False
) -> None:
    """Write it, or a part ``of`` it; a failure is logged. Old ones go unless ``all_kept``."""
    folder = store / FOLDER
    try:
        make_dir(folder)
        replace(folder / (_name(samples, fragment) + of), msgspec.msgpack.encode(it), durable=False)
        for name in () if all_kept else sorted(names(folder))[:-_KEPT]:
            (folder / name).unlink(missing_ok=True)
    except OSError:
        log.warning('The digests of the next step are not kept in %s', folder, exc_info=True)


def read(store: Path, samples: int, fragment: int) -> NextStep | None:
    found, parts = None, dict[str, Digests]()
    try:
        for path in sorted((store / FOLDER).glob(f'{_name(samples, fragment)}*'), reverse=True):
            found = msgspec.msgpack.decode(read_regular(path, _LARGEST), type=NextStep)
            parts |= found.parts
    except (OSError, msgspec.DecodeError, ValueError):
        return None
    return found and msgspec.structs.replace(found, parts=parts)


def difference(then: NextStep, now: NextStep) -> str:
    """What differs between two computations of a step, as part of a sentence; empty: nothing."""
    # A pipeline has parts of the model here and there.
    if then.state and now.state and (found := _differing(then.state, now.state)):
        return f'{found} had another value before the step'
    if then.batch != now.batch:
        return 'the next global batch has other samples'
    for shards in then.parts.keys() & now.parts.keys():
        if found := _differing(then.parts[shards], now.parts[shards]):
            return f'the gradient of {found} in the virtual shards {shards} differs'
    if then.measured is not None and now.measured is not None and then.device == now.device:
        return now.measured.difference(then.measured)
    if then.after is None or now.after is None:
        return ''
    if then.gradients is None or now.gradients is None:
        if then.gradients != now.gradients:
            return 'the gradient was finite in only one of both'
    elif found := _differing(then.gradients, now.gradients):
        return f'the gradient of {found} differs'
    if found := _differing(then.after, now.after):
        return f'the gradients are the same, and the step gives {found} another value'
    return ''


def _differing(then: Mapping[str, int], now: Mapping[str, int]) -> str:
    """The first name whose values differ, and how many others; empty: none."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    more = f' (and {len(names) - 1} of {len({**then, **now}) - 1} others)' if names[1:] else ''
    return f'{names[0]}{more}' if names else ''


def _name(samples: int, fragment: int) -> str:
    return f'f{fragment:06d}-{samples:012d}'  # in the order in which they are made

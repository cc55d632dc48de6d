"""The arguments of a trainer's call: futures among them, and those of the call before."""

import inspect
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from parsl.dataflow.dependency_resolvers import DEEP_DEPENDENCY_RESOLVER

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.off_loop import in_thread
from parsl_freetrain.host.files import read_regular, replace

logger = logging.getLogger(__name__)

FILE = 'arguments.json'
_SINCE = ''  # no argument's name: the checkpoint from which on they are what they are
_LONGEST = 200  # characters of an argument that is compared


def value_of(argument: Any) -> Any:
    """An argument with the values of futures in it, for which this waits."""
    resolver = DEEP_DEPENDENCY_RESOLVER
    futures = resolver.traverse_to_gather(argument)
    wait(futures)
    return resolver.traverse_to_unwrap(argument) if futures else argument


def values_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with what futures among them have."""
    return tuple(map(value_of, args)), {key: value_of(value) for key, value in kwargs.items()}


def when_done(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    """Call ``then`` once, when all futures are done; at once if there are none."""
    left = len(futures)
    lock = threading.Lock()
    if not left:
        then()

    def one_done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            # Not here: this may be the event loop, and arguments may be large.
            in_thread(then, 'FreeTrain-start')

    for future in futures:
        future.add_done_callback(one_done)


def by_name(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    bound = inspect.signature(function).bind(None, *args, **kwargs).arguments
    with suppress(TypeError):  # a tuple with names of its own
        return {name: value_of(value) for name, value in list(bound.items())[1:]}
    return {}


def compare(folder: Path, checkpoint: Checkpoint | None, arguments: Mapping[str, Any]) -> bool:
    """Write down plain arguments; warn of, and return, a difference from those before."""
    texts = {name: repr(value) for name, value in arguments.items() if _is_plain(value)}
    now = {name: text for name, text in texts.items() if len(text) <= _LONGEST}
    file, path = folder / FILE, '' if checkpoint is None else checkpoint.path
    try:
        before = json.loads(read_regular(file, 2**20)) if file.exists() else {}
        both = [name for name in now.keys() & before.keys() if now[name] != before[name]]
        if both or before.get(_SINCE) == path:
            now[_SINCE] = path
        replace(file, json.dumps(now).encode(), durable=False)
    except (OSError, ValueError):
        return False  # nothing depends on it
    if checkpoint is None or not both:
        return bool(path) and now.get(_SINCE) == path
    differ = '; '.join(sorted(f'{name} was {before[name]} and is {now[name]}' for name in both))
    logger.warning(
        f'Trainer {checkpoint.trainer!r} goes on from {checkpoint.path} with other arguments: '
        f'{differ}. From here on the function gets those of this call; but what the checkpoint '
        'holds stays: weights, ctx.state, and the states of optimizers and schedulers, with their '
        'learning rates.'
    )
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return len(value) <= _LONGEST and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def say_if_finished_before(found: Checkpoint, future: Future[Checkpoint]) -> None:
    """Warn where a trainer has found itself trained already."""
    if future.cancelled() or future.exception() is not None:
        return
    if future.result().samples == found.samples:
        logger.warning(
            f'Trainer {found.trainer!r} was trained to its end by an earlier run, and its result '
            f'is the checkpoint of that run, {found.path}, whatever has changed since. To train '
            "anew, give another trainer_name or checkpoint_dir, or Checkpoints(resume='never')."
        )

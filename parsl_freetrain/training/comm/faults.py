"""Errors that say that a device is broken, and not that the user's function is wrong."""

from __future__ import annotations

from collections.abc import Iterator

# The texts of cudaGetErrorString and hipGetErrorString, and of Level Zero. A kernel of the user may
# also be to blame for some of them (an illegal address). Then they come back on other nodes.
_RUNTIMES = ('CUDA error', 'CUDA driver error', 'HIP error')
_TEXTS = (
    'uncorrectable ECC error',
    'uncorrectable NVLink error',
    'over nvlink or a hardware error',
    'hardware stack error',
    'illegal memory access',
    'illegal instruction',
    'unspecified launch failure',
    'busy or unavailable',
    'capable device is detected',
    'system not yet initialized',
    'GPU is lost',
    'unknown error',
)
_DEVICE_LOST = 'ERROR_DEVICE_LOST'


def device_fault(error: BaseException) -> str:
    """The first line of the message of the error, or of one of its causes, that says that a device
    is broken; empty if there is none.
    """
    for cause in causes(error):
        text = str(cause)
        known = any(name in text for name in _RUNTIMES) and any(part in text for part in _TEXTS)
        if isinstance(cause, RuntimeError) and (known or _DEVICE_LOST in text):
            return text.strip().splitlines()[0]
    return ''


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors that it was raised from or while handling."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__

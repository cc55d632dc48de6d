"""Errors in which a device or a file system is in trouble, and not the user's function wrong."""

import errno
import os
from collections.abc import Iterator

# cudaGetErrorString's, hipGetErrorString's and Level Zero's. Those of a user's kernel come again.
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
_NO_MEMORY = (
    'out of memory',
    "can't allocate memory",
    'not enough memory',
    'Cannot allocate memory',
    'OUT_OF_DEVICE_MEMORY',
)
ASSERT = 'device-side assert'
ASSERTED = (
    '{} said CUDA error: device-side assert triggered, which mostly is an index or a class out of '
    'range. What the device printed of it is in {}; with worker_init="export '
    'CUDA_LAUNCH_BLOCKING=1" the traceback there ends in the line of the function that did it.'
)
"""Of the rank and its log. Launches are asynchronous, so the traceback names any later line."""
_DEVICE_LOST = 'ERROR_DEVICE_LOST'
_STORAGE = {
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENOTCONN),
    *(errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO, errno.ETIMEDOUT),
}
_STORAGE_SAID = tuple(
    os.strerror(number) for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
)


def device_fault(error: BaseException) -> str:
    """The first line of the error, or of its cause, that says that a device is broken; or empty."""
    for cause in causes(error):
        text = str(cause)
        known = any(name in text for name in _RUNTIMES) and any(part in text for part in _TEXTS)
        if isinstance(cause, RuntimeError) and (known or _DEVICE_LOST in text):
            return text.strip().splitlines()[0]
    return ''


def out_of_memory(kind: str, message: str) -> bool:
    return kind.endswith('MemoryError') or any(text in message for text in _NO_MEMORY)


def storage_trouble(error: BaseException) -> str:
    """What a file system in trouble has said; or empty. Some libraries pass on only its words."""
    for cause in causes(error):
        text = str(cause)
        if isinstance(cause, OSError) and cause.errno in _STORAGE:
            return text
        known = any(said in text for said in _STORAGE_SAID)
        if known and isinstance(cause, OSError | RuntimeError):
            return text.strip().splitlines()[-1]
    return ''


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors that it was raised from or while handling."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__

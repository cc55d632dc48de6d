"""What reproducible mode asks of torch, beside the order of its sums."""

import os
import sys
import warnings
from typing import Any

import torch
from torch.utils import deterministic

from parsl_freetrain.core.model.errors import BadInput

_SETTING: Any = deterministic  # torch makes its attributes at run time


def demand_determinism(*, warn_only: bool) -> None:
    """Have torch be deterministic; ``warn_only``: but not what cannot, or flash attention."""
    # CUDA's matrix products need it, and read it when they are first used.
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not torch.are_deterministic_algorithms_enabled() or warns is not warn_only:
        _use_deterministic_algorithms(warn_only)
    # Else a rank's second shape has kernels for all shapes compiled, another's first does not.
    compiler = sys.modules.get('torch._dynamo.config')
    if compiler is not None and compiler.automatic_dynamic_shapes:
        compiler.automatic_dynamic_shapes = False  # type: ignore[attr-defined]
    if torch._C._get_cudnn_benchmark():
        warnings.warn(
            'torch.backends.cudnn.benchmark is switched off: it chooses kernels by their speed.',
            stacklevel=1,
        )
        torch.backends.cudnn.benchmark = False


def fill_new_memory(wanted: bool) -> bool:
    """Set, and return, whether torch fills new memory (a tenth of a GPU's step)."""
    before = bool(_SETTING.fill_uninitialized_memory)
    _SETTING.fill_uninitialized_memory = wanted
    return before


def _use_deterministic_algorithms(warn_only: bool) -> None:
    if 'torch._inductor.config' in sys.modules:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        return
    # As torch's function, without importing the compiler, which takes long and is seldom used.
    os.environ['TORCHINDUCTOR_DETERMINISTIC'] = '1'
    torch._C._set_deterministic_algorithms(True, warn_only=warn_only)


def explained(error: BaseException) -> BaseException:
    """The error, or a sentence if torch refused an operation that is not deterministic."""
    if not isinstance(error, RuntimeError) or 'use_deterministic_algorithms' not in str(error):
        return error
    refusal = BadInput(
        f'Reproducible mode allows only deterministic operations, and torch says: {error} In '
        'FreeTrain, use another operation, or allow it by mode=Reproducible(warn_only=True), with '
        'which results may differ from run to run.'
    )
    return refusal.with_traceback(error.__traceback__)

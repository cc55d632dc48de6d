"""Where the library of an integration is missing, a sentence names the extra that has it."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from parsl_freetrain import BadInput


@pytest.mark.parametrize(
    ('module', 'library', 'extra'),
    [
        ('integrations.lightning', 'lightning', 'lightning'),
        ('integrations.lightning_fabric', 'lightning', 'lightning'),
        ('integrations.mlflow', 'mlflow', 'mlflow'),
        ('integrations.tensorboard', 'tensorboard', 'tensorboard'),
        ('integrations.transformers', 'accelerate', 'transformers'),
        ('integrations.transformers', 'transformers', 'transformers'),
        ('integrations.wandb', 'wandb', 'wandb'),
        ('tuning.optuna', 'optuna', 'optuna'),
    ],
)
def test_a_missing_library_is_a_sentence_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str, extra: str
) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.split('.')[0] == library:
                raise ModuleNotFoundError(f'No module named {library!r}', name=library)

    for name in [*sys.modules]:
        ours = name.startswith('parsl_freetrain.integrations.') or name.endswith(module)
        # transformers, too, which may have imported accelerate for another test.
        theirs = name.split('.')[0] in (library, extra)
        if ours or theirs or name.startswith('torch.utils.tensorboard'):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, 'meta_path', [Missing(), *sys.meta_path])
    wanted = f'needs {library}, which is not installed: pip install "parsl-freetrain[{extra}]".'
    with pytest.raises(BadInput, match=re.escape(wanted)):
        importlib.import_module(f'parsl_freetrain.{module}')

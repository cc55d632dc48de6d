"""Where a library that not every user has is missing, a sentence names it."""

import importlib
import re
import sys

import pytest

from parsl_freetrain import BadInput


@pytest.mark.parametrize(
    ('module', 'library', 'package'),
    [
        ('integrations.lightning', 'lightning', 'lightning'),
        ('integrations.lightning_fabric', 'lightning', 'lightning'),
        ('integrations.mlflow', 'mlflow', 'mlflow-skinny'),
        ('integrations.tensorboard', 'tensorboard', 'tensorboard'),
        ('integrations.transformers', 'accelerate', 'accelerate'),
        ('integrations.transformers', 'transformers', 'transformers'),
        ('integrations.wandb', 'wandb', 'wandb'),
        ('tuning.optuna', 'optuna', 'optuna'),
        ('replay.sweep', 'joblib', 'joblib'),
        ('replay.sweep', 'pandas', 'pandas'),
        ('replay.pictures', 'matplotlib', 'matplotlib'),
    ],
)
def test_a_missing_library_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str, package: str
) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.split('.')[0] == library:
                raise ModuleNotFoundError(f'No module named {library!r}', name=library)

    for name in [*sys.modules]:
        ours = name.startswith('parsl_freetrain.integrations.') or name.endswith(module)
        # transformers, too, which may have imported accelerate for another test.
        theirs = name.split('.')[0] in (library, module.split('.')[-1])
        if ours or theirs or name.startswith('torch.utils.tensorboard'):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, 'meta_path', [Missing(), *sys.meta_path])
    wanted = f'needs {library}, which is not installed: pip install {package}.'
    with pytest.raises(BadInput, match=re.escape(wanted)):
        importlib.import_module(f'parsl_freetrain.{module}')

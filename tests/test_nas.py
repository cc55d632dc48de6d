"""The search over architectures in ``workflows/nas.py``, with fewer of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from site_configs import laptop
from workflows import nas


def test_every_architecture_is_a_network() -> None:
    for values in itertools.product(*nas.SPACE.values()):
        model = nas.network(dict(zip(nas.SPACE, values, strict=True)))
        assert model(torch.zeros(2, 64)).shape == (2, 10)


@pytest.mark.long
def test_a_smaller_search(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = nas.main(laptop.config(nodes=2), trials=2, epochs=1)
    assert len(found.trials) == 2 and 0.1 < found.best.values[1] <= 1.0
    assert found.best.values[1] == max(trial.values[1] for trial in found.trials)
    assert 'best: {' in capsys.readouterr().out

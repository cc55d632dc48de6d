"""Sites on a machine with PBS in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.sites.pbspro import PALS, PbsSite
from tests.sites.batch_blocks import QUICK, Blocks
from tests.support.batch_tests import Rehearsal


@pytest.fixture
def blocks(pbs: Rehearsal, tmp_path: Path) -> Callable[..., Blocks]:
    """Makes sites on the machine, with their blocks in a folder that a shell would stumble on."""
    made: list[Blocks] = []

    def make(queue: str = 'batch', **settings: Any) -> Blocks:
        made.append(
            Blocks(
                tmp_path / f'a run with $HOME %j {len(made)}',
                PbsSite(queue=queue, **{**QUICK, 'launch': PALS, **settings}),
            )
        )
        return made[-1]

    return make

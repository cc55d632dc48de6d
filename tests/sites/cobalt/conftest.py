"""Sites on a machine with Cobalt in a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.sites.cobalt import CobaltSite
from tests.sites.batch_blocks import QUICK, Blocks
from tests.support.batch_tests import Rehearsal


@pytest.fixture
def blocks(cobalt: Rehearsal, tmp_path: Path) -> Callable[..., Blocks]:
    """Makes sites on the machine."""
    made: list[Blocks] = []

    def make(queue: str = 'batch', **settings: Any) -> Blocks:
        made.append(
            Blocks(tmp_path / f'run{len(made)}', CobaltSite(queue=queue, **{**QUICK, **settings}))
        )
        return made[-1]

    return make

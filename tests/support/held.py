"""The demonstration, held up until there is FILE: ``python -m tests.support.held FILE [...]``"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parsl_freetrain.training.loop.context import FragmentContext
from workflows import digits
from workflows.digits_models import train_digits

PAUSE_S = 0.75


def held_until(go: Path) -> Callable[..., None]:
    """The training of digits, which takes long until there is the file ``go``."""

    def held_up(ctx: FragmentContext, *data: Any, **settings: Any) -> None:
        class Held:
            def __getattr__(self, name: str) -> Any:
                return getattr(ctx, name)

            def report(self, **numbers: float) -> None:
                ctx.report(**numbers)
                if not go.exists():
                    half = (ctx.total_samples or 0) / 2
                    time.sleep(PAUSE_S if ctx.samples < half else 2 * PAUSE_S)

        train_digits(Held(), *data, **settings)  # type: ignore[arg-type]

    return held_up


def main(go: str, *arguments: str) -> int:
    setattr(digits, 'train_digits', held_until(Path(go)))  # noqa: B010
    return digits.main(arguments)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))

"""How a trainer looks in a notebook: a piece of HTML without scripts, in the notebook's own
colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 240, 40
"""Of the picture of the loss, in pixels."""


def html_of(
    name: str,
    state: str,
    samples: int,
    total: int | None,
    nodes: int,
    metrics: Mapping[str, float],
    losses: Sequence[tuple[int, float]],
) -> str:
    """A progress bar, the last metrics, and the loss over samples.

    Parameters
    ----------
    total
        Samples to train; None: unknown.
    losses
        (samples, loss) each, in order of time, finite.
    """
    done = f'{samples:,} of {total:,} samples' if total else f'{samples:,} samples'
    where = f' on {nodes} node{"s" * (nodes != 1)}' if nodes else ''
    bar = (
        f'<progress value="{min(samples, total)}" max="{total}" style="width: '
        f'{WIDTH}px"></progress><br/>'
        if total
        else ''
    )
    values = ', '.join(f'{escape(key)} {value:.4g}' for key, value in metrics.items())
    return (
        f'<div><b>{escape(name)}</b> '
        f'{escape(state)}{where}<br/>{bar}{done}{f"; {values}" if values else ""}'
        f'{_picture(losses)}</div>'
    )


def _picture(losses: Sequence[tuple[int, float]]) -> str:
    if len(losses) < 2:
        return ''
    first, last = min(s for s, _ in losses), max(s for s, _ in losses)
    low, high = min(v for _, v in losses), max(v for _, v in losses)
    scale_x, scale_y = WIDTH / ((last - first) or 1), HEIGHT / ((high - low) or 1.0)
    points = ' '.join(
        f'{scale_x * (s - first):.1f},{HEIGHT - scale_y * (v - low):.1f}' for s, v in losses
    )
    return (
        f'<br/><svg width="{WIDTH}" height="{HEIGHT + 4}" viewBox="0 -2 {WIDTH} '
        f'{HEIGHT + 4}" role="img" '
        f'aria-label="loss from {high:.4g} to {low:.4g}"><polyline points="{points}" '
        'fill="none" stroke="currentColor"/></svg>'
    )

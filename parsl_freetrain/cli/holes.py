"""``freetrain holes``: shows the holes that are available now; nothing is submitted."""

import json
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from parsl_freetrain.cli.where import NO_HOLES, JsonOption, SiteOption
from parsl_freetrain.core.model.types import Hole


def holes(site: SiteOption = None, as_json: JsonOption = False) -> None:
    """Show the holes available now. Nothing is submitted."""
    from parsl_freetrain.cli.sites import holes_of, provider_of

    found = holes_of(provider_of(site).site)
    if as_json:
        print(json.dumps(list(map(_document, found))))
    elif not found:
        print(NO_HOLES)
    else:
        Console().print(_table(found, time.time()))


def _document(hole: Hole) -> dict[str, Any]:
    """A hole for other programs, with the class of its nodes where they are told apart."""
    names = ('nodes', 'until_s', 'queue', 'names', *(('node_class',) if hole.node_class else ()))
    return {name: getattr(hole, name) for name in names}


def _table(found: Sequence[Hole], now: float) -> Table:
    classes = any(hole.node_class for hole in found)
    table = Table('nodes', 'for', 'until', 'queue', *(('class',) if classes else ()), 'names')
    for hole in found:
        end, more = hole.until_s, len(hole.names) - 8
        table.add_row(
            str(hole.nodes),
            'as long as nobody needs them' if end is None else f'{end - now:.0f} s',
            '' if end is None else time.strftime('%H:%M:%S', time.localtime(end)),
            hole.queue,
            *((hole.node_class,) if classes else ()),
            ', '.join(hole.names[:8]) + (f' and {more} more' if more > 0 else ''),
        )
    return table

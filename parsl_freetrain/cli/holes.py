"""``freetrain holes``: shows the holes that are available now; nothing is submitted."""

import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from parsl_freetrain.cli.where import NO_HOLES, JsonOption, SiteOption


def holes(site: SiteOption = None, as_json: JsonOption = False) -> None:
    """Show the holes available now. Nothing is submitted."""
    from parsl_freetrain.cli.sites import holes_of, provider_of

    found = holes_of(provider_of(site).site)
    if as_json:
        print(json.dumps(found))
    elif not found:
        print(NO_HOLES)
    else:
        Console().print(_table(found, time.time()))


def _table(found: list[dict[str, Any]], now: float) -> Table:
    classes = any('node_class' in hole for hole in found)
    table = Table('nodes', 'for', 'until', 'queue', *(('class',) if classes else ()), 'names')
    for hole in found:
        end = hole['until_s']
        table.add_row(
            str(hole['nodes']),
            'as long as nobody needs them' if end is None else f'{end - now:.0f} s',
            '' if end is None else time.strftime('%H:%M:%S', time.localtime(end)),
            hole['queue'],
            *((hole.get('node_class', ''),) if classes else ()),
            ', '.join(hole['names'][:8])
            + (f' and {len(hole["names"]) - 8} more' if len(hole['names']) > 8 else ''),
        )
    return table

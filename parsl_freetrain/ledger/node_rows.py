"""The blocks and nodes of a run, and what the site offers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from parsl_freetrain.ledger.pending_rows import PendingRows, Value, as_float, as_json


class NodeRows:
    """The tables ``blocks``, ``nodes`` and ``offers`` of one run."""

    def __init__(self, rows: PendingRows) -> None:
        self._rows = rows
        self._offers: dict[str, tuple[float, float]] = {}  # the last one of each node

    def block_opened(
        self,
        block: str,
        *,
        at: float,
        job_id: str | None,
        nodes: int,
        walltime_s: float | None,
        names: Sequence[str],
        node_class: str = '',
    ) -> None:
        """A block was submitted; ``names`` is empty where the scheduler chooses the nodes, and
        ``node_class`` where the site does not tell them apart.
        """
        self._rows.insert(
            'blocks',
            {
                'block': str(block),
                'opened_at': float(at),
                'job_id': None if job_id is None else str(job_id),
                'nodes': int(nodes),
                'walltime_s': as_float(walltime_s),
                'until': None if walltime_s is None else float(at) + float(walltime_s),
                'names': as_json(list(names)),
                'node_class': str(node_class),
            },
            at,
            replace=True,
        )

    def block_until(self, block: str, *, until: float | None) -> None:
        """The end of a block became known or moved; without this call it is opening + walltime,
        where that is known.
        """
        self._rows.update('blocks', {'block': str(block)}, {'until': as_float(until)}, None)

    def block_closed(self, block: str, *, at: float, how: str) -> None:
        """A block is over: 'taken', 'expired', 'returned', 'cancelled' or 'lost'."""
        closed: dict[str, Value] = {'closed_at': float(at), 'how': str(how)}
        self._rows.update('blocks', {'block': str(block)}, closed, at)

    def joined(self, node: str, *, at: float, block: str, name: str) -> None:
        """A node is ready for fragments, maybe again; ``node`` is unique within the run, ``name``
        is the machine's.
        """
        self._rows.execute(
            'INSERT INTO nodes (run, node, block, name, joined_at) VALUES (?, ?, ?, ?, ?) '
            'ON CONFLICT (run, node) DO UPDATE SET left_at = NULL, how = NULL',
            (self._rows.run(), str(node), str(block), str(name), float(at)),
            at,
        )

    def left(self, node: str, *, at: float, how: str) -> None:
        """A node is gone."""
        self._rows.update('nodes', {'node': str(node)}, {'left_at': float(at), 'how': str(how)}, at)

    def offered(self, offers: Iterable[tuple[str, float, float | None]]) -> None:
        """The site's offers, (node name, start, end) each. Only what is new is written: an offer
        that begins within the last one of its node makes that one longer.

        An end of None (or infinity) is not known. Time after the run's end never counts as offered.
        """
        for name, start, end in sorted(offers, key=lambda offer: (offer[0], offer[1])):
            end = math.inf if end is None else float(end)
            since, until = self._offers.get(name, (start, -math.inf))
            if end <= until and not (math.isinf(until) and start == since and end < until):
                continue
            known_end = {'end': None if math.isinf(end) else end}
            if start <= until:
                key: dict[str, Value] = {'name': str(name), 'start': float(since)}
                self._rows.update('offers', key, known_end, None)
            else:
                since = float(start)
                self._rows.insert('offers', {'name': str(name), 'start': since, **known_end}, None)
            self._offers[name] = (since, end)

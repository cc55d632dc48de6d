"""What a site's file claims of its machine, compared with what the scheduler and the nodes say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parsl_freetrain.cli.doctor.findings import Finding
from parsl_freetrain.sites.batch.limits import QueueLimits
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import Partition

SLOW_IMPORT_S = 60.0


class SiteFile:
    """A site's file, and which line of it says what."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = path.read_text().splitlines()

    def line(self, *words: str) -> str:
        """The place of the first line that has one of the words, the first word first."""
        for word in words:
            for number, text in enumerate(self._lines, 1):
                if re.search(rf'(?<![\w-]){re.escape(word)}(?![\w-])', text.split('#')[0]):
                    return f'{self.path}, line {number}'
        return str(self.path)


def of_queue(
    file: SiteFile, name: str, limits: QueueLimits, told: Partition, *, whole: bool = True
) -> list[Finding]:
    """A machine's queue as the file states it. What the scheduler does not limit is not compared,
    since the centre may refuse jobs by other means. ``whole``: whether the file states the limits
    of the whole queue; otherwise those of a part of it (a QOS, or jobs of some sizes), which may be
    narrower.
    """
    most = (
        ('maximum number of nodes', limits.nodes[1], told.most_nodes),
        ('maximum walltime in s', limits.walltime_s[1], told.longest_s),
        ('maximum number of waiting jobs', limits.jobs, told.most_waiting),
    )
    least = (
        ('minimum number of nodes', limits.nodes[0], told.least_nodes or None),
        ('minimum walltime in s', limits.walltime_s[0], told.shortest_s or None),
    )
    wrong = [
        (what, claimed, found, found < claimed if one in most else found > claimed)
        for one in (*most, *least)
        for what, claimed, found in [one]
        if found is not None and found != claimed
    ]
    if not whole:
        wrong = [one for one in wrong if one[3]]
    where = file.line(repr(name), f'"{name}"')
    return [
        Finding(
            f'queue {name}',
            'bad' if refused else 'note',
            f'{where} is out of date: {what} is {_plain(claimed)} there, and {_plain(found)} to '
            'the scheduler',
        )
        for what, claimed, found, refused in wrong
    ] or [Finding(f'queue {name}', 'ok', 'exists, with limits as stated')]


def _plain(value: Any) -> str:
    return f'{value:g}' if isinstance(value, int | float) else str(value)


def of_options(file: SiteFile, options: BatchOptions, told: Partition) -> list[Finding]:
    """The settings of the site itself: each must be within what the queue allows."""
    wrong = [
        (name, value, f'at {"most" if most else "least"} {limit:g}')
        for name, value, limit, most in (
            ('most_nodes', options.most_nodes, told.most_nodes, True),
            ('least_nodes', options.least_nodes, told.most_nodes, True),
            ('longest_s', options.longest_s, told.longest_s, True),
            ('max_waiting', options.max_waiting, told.most_waiting, True),
        )
        if name in options.model_fields_set
        and value is not None
        and limit is not None
        and value > limit
    ]
    return [
        Finding(
            f'setting {name}',
            'bad',
            f'{file.line(name)} is out of date: {name} is {_plain(value)}, and the queue '
            f'{told.name!r} takes {limit}',
        )
        for name, value, limit in wrong
    ] or [Finding('settings of the site', 'ok', f'fit the queue {told.name!r}')]


def of_nodes(
    file: SiteFile,
    options: BatchOptions,
    seen: Sequence[Mapping[str, Any]],
    reached: Sequence[tuple[str, Sequence[str]]],
    asked: int,
) -> list[Finding]:
    """What the nodes of a job saw; see :mod:`parsl_freetrain.training.process.node_check`."""
    found: list[Finding] = []
    if len(seen) < asked:
        found.append(
            Finding(
                'nodes',
                'bad',
                f'{len(seen)} of {asked} nodes have answered; {file.line("worker_init")} must make '
                'Python ready with parsl-freetrain',
            )
        )
    for node in seen:
        what, torch = f'node {node["node"]}', node['torch']
        if 'error' in torch:
            found.append(
                Finding(
                    what,
                    'bad',
                    f'torch cannot be used: {torch["error"]}; {file.line("worker_init")} must make '
                    'it ready',
                )
            )
            continue
        count, claimed = node['accelerators'], options.gpus_per_node
        if claimed and count != claimed:
            found.append(
                Finding(
                    what,
                    'bad',
                    f'{file.line("gpus_per_node")} is out of date: gpus_per_node is {claimed}, and '
                    f'torch sees {count}',
                )
            )
        slow = torch['import_s'] > SLOW_IMPORT_S
        found.append(
            Finding(
                what,
                'note' if slow else 'ok',
                f'{count} accelerators, torch {torch["version"]} imported in '
                f'{torch["import_s"]:.1f} s',
            )
        )
        if node['tmpdir']['error']:
            found.append(
                Finding(
                    what,
                    'bad',
                    f'no socket can be made in TMPDIR={node["tmpdir"]["folder"]} '
                    f'({node["tmpdir"]["error"]}): {file.line("TMPDIR", "worker_init")} must set a '
                    'short one, as by "export TMPDIR=/tmp"',
                )
            )
        if 'address_error' in node:
            found.append(
                Finding(
                    what, 'bad', f'{file.line("interface")} is out of date: {node["address_error"]}'
                )
            )
    lost = [f'{one} does not reach {", ".join(others)}' for one, others in reached if others]
    found.append(
        Finding(
            'ports between nodes',
            'bad' if lost else 'ok',
            f'{"; ".join(lost)}; see {file.line("interface")}'
            if lost
            else f'all {len(seen)} reach each other',
        )
    )
    return found

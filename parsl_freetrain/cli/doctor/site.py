"""Compares a site's file with its scheduler, and with what the nodes of one job see."""

import contextlib
import inspect
import json
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parsl.jobs.states import TERMINAL_STATES

from parsl_freetrain.cli.doctor.checks import Finding, judged
from parsl_freetrain.cli.doctor.measuring import private_folder
from parsl_freetrain.cli.sites import file_of, provider_of
from parsl_freetrain.core.model.checked_settings import given
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.batch.limits import QueueLimits
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import Partition
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.named import load_site_file
from parsl_freetrain.sites.provider import BackfillProvider

JOB_S = 300.0
POLL_S = 1.0
SLOW_IMPORT_S = 60.0


class SiteFile:
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


def examine(given: str, folder: Path, nodes: int, wait_s: float) -> list[Finding]:
    """Compare a site's file with its machine; a job of ``nodes``, if any, answers in ``folder``."""
    path = Path(given) if given.endswith('.toml') else file_of(given)
    provider = provider_of(given)
    site = provider.site
    if not isinstance(site, BatchSite) or path is None:
        raise BadInput(f'The site {given!r} has no batch scheduler whose word could be compared.')
    file = SiteFile(path)
    found: list[Finding] = []
    for name, limits, one in _queues(path, site):
        try:
            told, lacking = one.limits(), one.lacking()
        except FreeTrainError as error:
            where = file.line(repr(name), f'"{name}"', name)
            found.append(Finding(f'queue {name}', 'bad', f'{where} is out of date: {error}'))
            continue
        if lacking:
            found.append(Finding(f'queue {name}', 'bad', f'{file.line(name)}: {lacking}'))
        found += [Finding(f'queue {name}', 'note', note) for note in told.notes]
        if limits is None:
            found += of_options(file, one.options, told)
        else:
            whole = limits.partition is None and not getattr(one.options, 'qos', None)
            found += of_queue(file, name, limits, told, whole=whole)
    if nodes and all(finding.state != 'bad' for finding in found):
        found += _on_nodes(file, provider, site, folder, nodes, wait_s)
    return found


def _queues(path: Path, site: BatchSite) -> list[tuple[str, QueueLimits | None, BatchSite]]:
    """All queues in a Python file's QUEUES; and the site's own, if that has no limits there."""
    module = load_site_file(path) if path.suffix == '.py' else None
    stated: dict[str, QueueLimits] = getattr(module, 'QUEUES', {})
    if module is None or not stated:
        return [(site.queue, None, site)]
    takes = {'account', 'partition'} & inspect.signature(module.site).parameters.keys()
    given = {name: getattr(site.options, name, None) for name in takes}
    return [(name, limits, module.site(queue=name, **given)) for name, limits in stated.items()]


def of_queue(
    file: SiteFile, name: str, limits: QueueLimits, told: Partition, *, whole: bool = True
) -> list[Finding]:
    """A queue as the file states it, for what the scheduler limits; a part may be narrower."""
    # What, as the file has it, as the scheduler has it, and whether larger claims are refused.
    compared = (
        ('maximum number of nodes', limits.nodes[1], told.most_nodes, True),
        ('maximum walltime in s', limits.walltime_s[1], told.longest_s, True),
        ('maximum number of waiting jobs', limits.jobs, told.most_waiting, True),
        ('minimum number of nodes', limits.nodes[0], told.least_nodes or None, False),
        ('minimum walltime in s', limits.walltime_s[0], told.shortest_s or None, False),
    )
    where, found = file.line(repr(name), f'"{name}"'), []
    for what, claimed, said, most in compared:
        if said is None or said == claimed:
            continue
        refused = (said < claimed) == most
        if refused or whole:
            says = f'{where} is out of date: {what} is {claimed:g} there, {said:g} to the scheduler'
            found.append(Finding(f'queue {name}', 'bad' if refused else 'note', says))
    return found or [Finding(f'queue {name}', 'ok', 'exists, with limits as stated')]


def of_options(file: SiteFile, options: BatchOptions, told: Partition) -> list[Finding]:
    """The settings of the site itself: each must be within what the queue allows."""
    found = []
    for name, limit in (
        ('most_nodes', told.most_nodes),
        ('least_nodes', told.most_nodes),
        ('longest_s', told.longest_s),
        ('max_waiting', told.most_waiting),
    ):
        value = given(options).get(name)
        if value is not None and limit is not None and value > limit:
            says = (
                f'{file.line(name)} is out of date: {name} is {value:g}, and the queue '
                f'{told.name!r} takes at most {limit:g}'
            )
            found.append(Finding(f'setting {name}', 'bad', says))
    return found or [Finding('settings of the site', 'ok', f'fit the queue {told.name!r}')]


def _on_nodes(
    file: SiteFile,
    provider: BackfillProvider,
    site: BatchSite,
    folder: Path,
    nodes: int,
    wait_s: float,
) -> list[Finding]:
    with private_folder(folder) as shared:
        provider.script_dir = str(shared)
        words = [str(shared), str(nodes), *([site.interface] if site.interface else [])]
        node = ['python3', '-P', '-m', 'parsl_freetrain.training.process.probe', *words]
        command = shlex.join(node)
        try:
            site.start()
            name = f'doctor-{secrets.token_hex(3)}'
            job = provider.open_block(BlockRequest(nodes, JOB_S), command, name)
        except FreeTrainError as error:
            return [Finding('nodes', 'bad', f'a job of {nodes} nodes was refused: {error}')]
        try:
            until = time.monotonic() + wait_s
            while time.monotonic() < until:
                if provider.status([job])[0].state in TERMINAL_STATES:
                    break
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(FreeTrainError):
                provider.cancel([job])
        seen = [json.loads(one.read_bytes()) for one in sorted(shared.glob('*.node'))]
        reached = [json.loads(one.read_bytes()) for one in sorted(shared.glob('*.reached'))]
        found = list(of_nodes(file, site.options, seen, reached, nodes))
        return found + ([] if len(seen) == nodes else _last_lines(shared))


def of_nodes(
    file: SiteFile,
    options: BatchOptions,
    seen: Sequence[Mapping[str, Any]],
    reached: Sequence[tuple[str, Sequence[str]]],
    asked: int,
) -> Iterator[Finding]:
    """What the nodes of a job saw; see :mod:`parsl_freetrain.training.process.probe`."""
    if len(seen) < asked:
        init = f'{file.line("worker_init")} must make Python ready with parsl-freetrain'
        yield Finding('nodes', 'bad', f'{len(seen)} of {asked} nodes have answered; {init}')
    for node in seen:
        yield from _of_node(file, options, node)
    lost = '; '.join(f'{one} does not reach {", ".join(them)}' for one, them in reached if them)
    says = f'all {len(seen)} reach each other'
    bad = f'{lost}; see {file.line("interface")}' if lost else ''
    yield judged('ports between nodes', says, bad=bad)


def _of_node(file: SiteFile, options: BatchOptions, node: Mapping[str, Any]) -> Iterator[Finding]:
    what, torch, tmpdir = f'node {node["node"]}', node['torch'], node['tmpdir']
    if 'error' in torch:
        init = f'{file.line("worker_init")} must make it ready'
        yield Finding(what, 'bad', f'torch cannot be used: {torch["error"]}; {init}')
        return
    count, claimed = node['accelerators'], options.gpus_per_node
    wrong = {
        f'{file.line("gpus_per_node")} is out of date: gpus_per_node is {claimed}, and torch sees '
        f'{count}': claimed and count != claimed,
        f'no socket can be made in TMPDIR={tmpdir["folder"]} ({tmpdir["error"]}): '
        f'{file.line("TMPDIR", "worker_init")} must set a short one, as by '
        '"export TMPDIR=/tmp"': tmpdir['error'],
        f'{file.line("interface")} is out of date: {node.get("address_error")}': (
            'address_error' in node
        ),
    }
    yield from (Finding(what, 'bad', says) for says, holds in wrong.items() if holds)
    import_s = torch['import_s']
    says = f'{count} accelerators, torch {torch["version"]} imported in {import_s:.1f} s'
    yield judged(what, says, note=import_s > SLOW_IMPORT_S)


def _last_lines(shared: Path) -> list[Finding]:
    files = [*sorted(shared.glob('*.std*')), *sorted(shared.glob('*.err'))]
    texts = (path.read_text(errors='replace') for path in files)
    lines = [line for text in texts for line in text.splitlines()[-3:]]
    return [Finding('the job', 'note', ' / '.join(lines)[:1000])] if lines else []

"""Asks a site's scheduler, and the nodes of one job, whether what its file claims is true."""

from __future__ import annotations

import contextlib
import inspect
import json
import secrets
import shlex
import time
from pathlib import Path
from typing import Any

from parsl.jobs.states import TERMINAL_STATES

from parsl_freetrain.cli.doctor.claims import SiteFile, of_nodes, of_options, of_queue
from parsl_freetrain.cli.doctor.findings import Finding
from parsl_freetrain.cli.doctor.measuring import private_folder
from parsl_freetrain.cli.sites import file_of, provider_of
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.batch.limits import QueueLimits
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.named import load_site_file
from parsl_freetrain.sites.provider import BackfillProvider

JOB_S = 300.0
POLL_S = 1.0


def examine(given: str, folder: Path, nodes: int, wait_s: float) -> list[Finding]:
    """Compare a site's file with its machine.

    Parameters
    ----------
    given
        The site, as for the other verbs.
    folder
        Where the nodes of the job write their answers; they must see it.
    nodes
        Number of nodes of a job that examines them; 0: none is submitted.
    wait_s
        Seconds until this job must have ended.

    Raises
    ------
    BadInput
        There is no such site, or it has no batch scheduler.
    """
    path = Path(given) if given.endswith('.toml') else file_of(given)
    provider = provider_of(given)
    site = provider.site
    if not isinstance(site, BatchSite) or path is None:
        raise BadInput(f'The site {given!r} has no batch scheduler whose word could be compared.')
    file = SiteFile(path)
    found: list[Finding] = []
    for name, limits, one in _queues(path, site):
        try:
            told = one.limits()
        except FreeTrainError as error:
            where = file.line(repr(name), f'"{name}"', name)
            found.append(Finding(f'queue {name}', 'bad', f'{where} is out of date: {error}'))
            continue
        if limits is None:
            found += of_options(file, one.options, told)
        else:
            whole = limits.partition is None and not getattr(one.options, 'qos', None)
            found += of_queue(file, name, limits, told, whole=whole)
    if nodes and all(finding.state != 'bad' for finding in found):
        found += _on_nodes(file, provider, site, folder, nodes, wait_s)
    return found


def _queues(path: Path, site: BatchSite) -> list[tuple[str, QueueLimits | None, BatchSite]]:
    """All queues that a Python file states in its QUEUES; and the site's own, if that has no limits
    there.
    """
    module = load_site_file(path) if path.suffix == '.py' else None
    stated: dict[str, QueueLimits] = getattr(module, 'QUEUES', {})
    if module is None or not stated:
        return [(site.queue, None, site)]
    given = {
        name: getattr(site.options, name, None)
        for name in ('account', 'partition')
        if name in inspect.signature(module.site).parameters
    }
    return [(name, limits, module.site(queue=name, **given)) for name, limits in stated.items()]


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
        command = shlex.join(
            ['python3', '-P', '-m', 'parsl_freetrain.training.process.node_check', *words]
        )
        try:
            site.start()
            job = provider.open_block(
                BlockRequest(nodes, JOB_S), command, f'doctor-{secrets.token_hex(3)}'
            )
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
        found = of_nodes(file, site.options, seen, reached, nodes)
        return found + ([] if len(seen) == nodes else _said(shared))


def _said(shared: Path) -> list[Finding]:
    """The last lines that the job wrote."""
    lines: list[Any] = [
        line
        for path in sorted(shared.glob('*.std*')) + sorted(shared.glob('*.err'))
        for line in path.read_text(errors='replace').splitlines()[-3:]
    ]
    return [Finding('the job', 'note', ' / '.join(lines)[:1000])] if lines else []

"""What holds for every site: a new one adds itself to SITES."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import BlockRequest, Hole
from parsl_freetrain.sites.cobalt import CobaltSite
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.pbspro import PbsSite
from parsl_freetrain.sites.protocols import HoleGone, Site
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.registry import site_types
from parsl_freetrain.sites.slurm import SlurmSite
from tests.support.waiting import wait_until

QUICK: dict[str, Any] = {'poll_s': 0.4, 'submit_every_s': 0.0}
QUICK |= {'start_s': 2.0, 'margin_s': 2.0, 'ending_s': 2.0}
# Each gives a site with at least two idle nodes.
SITES: dict[str, Callable[[], Site]] = {
    'local': lambda: LocalSite(3),
    'slurm': lambda: SlurmSite(partition='batch', **QUICK),
    'openpbs': lambda: PbsSite(queue='batch', **QUICK),
    'cobalt': lambda: CobaltSite(queue='batch', **QUICK),
    'lsf': lambda: site_types()['lsf'].make(queue='batch', **QUICK),
}
# Fixtures: real servers, and machines in a folder.
NEEDS = {'slurm': [pytest.mark.slurm], 'openpbs': [pytest.mark.pbs], 'cobalt': [], 'lsf': []}


@pytest.fixture(params=[pytest.param(name, marks=NEEDS.get(name, [])) for name in sorted(SITES)])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if request.param in NEEDS:
        request.getfixturevalue(request.param)
    made = SITES[request.param]()
    made.script_dir = str(request.getfixturevalue('tmp_path'))
    made.start()
    yield made
    made.close()


@pytest.fixture
def provider(site: Site) -> Iterator[BackfillProvider]:
    made = BackfillProvider(site)
    yield made
    made.cancel(list(made._jobs))


def test_a_site_says_what_it_is_and_nothing_of_unknown_jobs(site: Site) -> None:
    assert site.name
    assert site.poll_s > 0
    assert isinstance(site.spans_blocks, bool)
    assert isinstance(site.is_local, bool)
    assert site.interface is None or site.interface
    site.gone('no such job')
    assert site.end_of('no such job') is None
    now = time.time()
    for offer in site.offers(now - 5, now + 5):
        assert now - 5 <= offer.start < offer.end <= now + 5


def first_holes(site: Site) -> tuple[Hole, ...]:
    """Once the site has had an answer; a scheduler may take its time."""
    found: list[tuple[Hole, ...]] = []
    wait_until(lambda: found.append(site.holes()) or found[-1])  # type: ignore[func-returns-value]
    return found[-1]


def test_a_block_fills_a_hole_that_comes_back(site: Site, provider: BackfillProvider) -> None:
    holes = first_holes(site)
    for hole in holes:
        assert hole.nodes >= 1
        assert hole.until_s is None or hole.until_s > time.time()
        assert not hole.names or len(set(hole.names)) == hole.nodes
    with pytest.raises(BadInput):
        provider.open_block(BlockRequest(0), 'true', 'contract')
    before, hole = sum(hole.nodes for hole in holes), holes[0]
    job = provider.open_block(
        BlockRequest(hole.nodes, 300.0, hole.queue, hole.names), 'sleep 600', 'contract'
    )
    wait_until(lambda: provider.status([job])[0].status_name == 'RUNNING')
    assert sum(h.nodes for h in site.holes()) == before - hole.nodes
    end = provider.end_of(job)
    assert end is None or end <= time.time() + 360
    assert provider.cancel([job]) == [True]
    wait_until(lambda: provider.status([job])[0].terminal)
    wait_until(lambda: sum(h.nodes for h in site.holes()) == before)


def test_each_block_is_one_job(site: Site, provider: BackfillProvider, tmp_path: Path) -> None:
    """worker_init runs once, the command on each node; when they have ended the nodes are back."""
    before = sum(hole.nodes for hole in first_holes(site))
    jobs: list[str] = []

    def opened() -> bool:
        """One submission at a time: a site may ask to look at the holes again."""
        with contextlib.suppress(HoleGone):
            command, name = f'echo "$GREETING" >> {tmp_path}/said', f'block-{len(jobs)}'
            greeting = 'export GREETING=hello'
            jobs.append(site.open_block(BlockRequest(1, 300.0), command, name, greeting))
        return len(jobs) == 2

    wait_until(opened)
    wait_until(lambda: all(status.terminal for status in site.statuses(jobs)))
    assert len(set(jobs)) == 2
    assert {status.status_name for status in site.statuses(jobs)} == {'COMPLETED'}
    assert (tmp_path / 'said').read_text() == 'hello\nhello\n'
    for job in jobs:
        site.gone(job)
    wait_until(lambda: sum(hole.nodes for hole in site.holes()) == before)


def test_start_twice_and_no_holes_after_close_until_it_is_started_again(site: Site) -> None:
    site.start()
    site.close()
    assert site.holes() == ()
    site.start()
    wait_until(site.holes)

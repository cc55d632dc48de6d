"""``freetrain plan``: the blocks that would fill the present holes, with their batch scripts."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from parsl_freetrain.cli.where import NO_HOLES, JsonOption, SiteOption, value
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.checked_values import Seconds, check_value
from parsl_freetrain.core.model.errors import BadInput, clean, nodes_text
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.replay.forecast import Forecast, PlannedBlock, forecasts, trainers_at

if TYPE_CHECKING:
    from parsl_freetrain.sites.provider import BackfillProvider

UNIT = 'charged node-hours'
# The executor's addresses, ports and certificates are only known when it runs.
COMMAND = (
    'python3 -P -m parsl_freetrain.training.process.node_agent '
    'python3 -P -m parsl_freetrain.executor.block.manager ...'
)
PLANNED = 'nodes', 'walltime_s', 'hole_s', 'preemptible', 'exempt_s', 'node_class'


def plan(
    site: SiteOption = None,
    trainers: Annotated[
        Path | None,
        value(
            'FILE',
            'The trainers: a JSON list as for replay, or the ledger of a run. Adds a '
            'prediction for each.',
        ),
    ] = None,
    start: Annotated[
        float, value('S', 'For the lower prediction: every block starts S seconds late.')
    ] = 60.0,
    look_ahead: Annotated[
        float, value('S', 'For the upper prediction: a preemptible block lasts at most S seconds.')
    ] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Show every block that would be submitted, and its exact batch script; nothing is sent.

    The plan has a block for every hole. A run submits only the blocks that its trainers can use,
    one at a time.
    """
    for name, seconds in (('--start', start), ('--look-ahead', look_ahead)):
        check_value(name, seconds, Seconds)
    from parsl_freetrain.cli.sites import provider_of
    from parsl_freetrain.executor.settings import check_classes

    who = [] if trainers is None else trainers_at(trainers)
    provider = provider_of(site)
    for one in who:
        check_classes(one.trainer, provider.site)
    blocks = blocks_for(provider, time.time())
    site_ = provider.site
    settings = ControllerSettings(min_hole_s=provider.min_hole_s, spans_blocks=site_.spans_blocks)
    planned = [PlannedBlock(*(block[name] for name in PLANNED)) for block in blocks]
    expected = forecasts(planned, who, settings, start, look_ahead)
    if as_json:
        print(json.dumps({'blocks': blocks, 'trainers': [asdict(one) for one in expected]}))
        return
    _show(provider, blocks)
    if expected:
        print('### predictions for these blocks, if no other nodes come or go')
        print('\n'.join(clean(_in_words(one)) for one in expected))


def _show(provider: 'BackfillProvider', blocks: list[dict[str, Any]]) -> None:
    from parsl_freetrain.sites.protocols import Yielding

    if not blocks:
        print(NO_HOLES, 'Nothing would be submitted.')
    for number, block in enumerate(blocks):
        lasts = f'for {block["walltime_s"]} s' + (
            ', or until preempted'
            if block['preemptible']
            else ', or until a job of others waits that would start on its nodes'
            if isinstance(provider.site, Yielding)
            else ''
        )
        of_class = f'on {block["node_class"]} ' if block['node_class'] else ''
        if block['exempt_s']:
            lasts += f' after {block["exempt_s"]:g} s'
        print(
            f'### block {number}: {nodes_text(block["nodes"])} of {block["queue"]} '
            f'{of_class}{lasts}; it costs {block["cost"][0]:.3g} to {block["cost"][1]:.3g} '
            f'{UNIT}\n{block["script"]}'
        )


def _in_words(found: Forecast) -> str:
    early, late = found.finish_s
    if early is None:
        finish = 'not finished in these holes'
    else:
        finish = f'finished in {early:.0f} s ' + (
            'at best, or not in these holes' if late is None else f'to {late:.0f} s'
        )
    left = '' if found.left is None else f' of the {found.left:,} that are left'
    samples = f'{found.samples[0]:,.0f} to {found.samples[1]:,.0f} samples'
    return f'{found.trainer}: {samples}{left}; {finish}'


def blocks_for(provider: 'BackfillProvider', now: float) -> list[dict[str, Any]]:
    """The blocks for the present holes, largest first; BadInput for a site without scripts."""
    from parsl_freetrain.cli.sites import holes_of
    from parsl_freetrain.sites.batch.site import BatchSite

    where = provider.site
    if not isinstance(where, BatchSite):
        raise BadInput(
            f'The site {where.name!r} has no batch scripts to show; name a site with a '
            'batch scheduler.'
        )
    blocks: list[dict[str, Any]] = []
    for hole in sorted(holes_of(where), key=lambda hole: -hole.nodes)[: provider.max_blocks]:
        hole_s = None if hole.until_s is None else hole.until_s - now
        what = hole.nodes, hole_s, hole.queue, hole.names
        request = BlockRequest(*what, node_class=hole.node_class)
        name, scripts = f'block-{len(blocks)}', Path('runinfo/000/submit_scripts').absolute()
        shape, script = where.preview(request, COMMAND, scripts, name, provider.worker_init)
        blocks.append(
            {
                'nodes': shape.nodes,
                'walltime_s': shape.walltime_s,
                'hole_s': hole_s,
                'queue': hole.queue,
                'node_class': request.node_class,
                'preemptible': where.options.preemptible,
                'exempt_s': where.options.exempt_s,
                'cost': [
                    where.options.charge.cost(shape.nodes, lasts_s)
                    for lasts_s in (0.0, shape.walltime_s)
                ],
                'script': script,
            }
        )
    return blocks

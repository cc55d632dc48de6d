"""Events and actions as JSON: what comes back is what was written."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.charge import Charge
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.event_json import (
    decode_actions,
    decode_events,
    encode,
    from_json,
    to_json,
)
from parsl_freetrain.core.model.node_demand import BlockNodes, NodeDemand
from parsl_freetrain.core.model.types import BlockRequest, Efficiency, Hole, ScalingCurve, Trainer

TRAINER = Trainer(
    'a', 1, 4, 100, ScalingCurve((1, 2), (1.0, 2.0)), sizes=(1, 2), finish_by_s=1e9 + 0.1,
    efficiency=Efficiency((1,), (1.0,)), user='anna', stated_costs=('up',),
)  # fmt: skip
EVENTS: tuple[ev.Event, ...] = (
    ev.HolesSeen(0.1 + 0.2, (Hole(2, None, 'q', ('x', 'y')), Hole(1, 5.5))),
    ev.BlockOpened(1.0, 'b', BlockRequest(2, 60.0)),
    ev.NodesJoined(2.0, 'b', ('b/x', 'b/y'), math.inf),
    ev.BlockStarted(1.5, 'b', 1.2),
    ev.BlockRequeued(2.5, 'b'),
    ev.BlockEndKnown(3.0, 'b', None),
    ev.NodesNeeded(
        3.5, (NodeDemand('7', 1, frozenset({'b/x'})),), (BlockNodes('b', ('b/x', 'b/y')),)
    ),
    ev.NodesLeft(4.0, ('b/x',)),
    ev.BlockClosed(5.0, 'b'),
    ev.TrainerSubmitted(6.0, TRAINER, 7, 1),
    ev.TotalKnown(7.0, 'a', 1000),
    ev.FragmentProgressed(8.0, 'a', 1, 64, 1 / 3),
    ev.Rescaled(9.0, 'a', 1, 1, 2, 0.7),
    ev.FragmentEnded(11.0, 'a', 1, 64, ev.Ending.FAILED, 'a bad name \udcff', True),
    ev.TrainerCancelled(12.0, 'a'),
    ev.TrainerAborted(12.5, 'net', 'no node can be used'),
    ev.OrdinaryWork(13.0, 3),
    ev.Tick(14.0),
    ev.ShutdownRequested(15.0),
)
ACTIONS: tuple[ev.Action, ...] = (
    ev.OpenBlock(
        BlockRequest(
            1, None, 'q', ('x',), charge=Charge(0.25, 60.0, 1.0), lasts_s=math.inf, exempt_s=9.0
        )
    ),
    ev.CloseBlock('b', 'idle'),
    ev.StartFragment('a', 1, ('b/x',), None, 0, 0, 7.5),
    ev.StopFragment('a', 1, 'rescale', ('b/x', 'b/y')),
    ev.AbandonFragment('a', 1),
    ev.EndTrainer('a', 'failed', 'why'),
    ev.ReleaseNodes('b', ('b/y',), 'job 7 waits for its nodes'),
)


def test_every_event_and_action_comes_back_as_it_was() -> None:
    assert {type(event) for event in EVENTS} == set(ev.Event.__subclasses__()) - set(ev.NOTES)
    assert {type(action) for action in ACTIONS} == set(get_args(ev.Action))
    assert decode_events(encode(EVENTS)) == EVENTS
    back = decode_actions(encode(ACTIONS))
    assert back == ACTIONS and isinstance(back[3], ev.StopFragment)
    assert repr(back) == repr(ACTIONS)  # equality does not look at everything


def test_numbers_of_numpy_are_numbers() -> None:
    event = ev.FragmentProgressed(1.0, 'a', 1, np.int64(64), np.float32(0.5))  # type: ignore[arg-type]
    assert decode_events(encode((event,))) == (ev.FragmentProgressed(1.0, 'a', 1, 64, 0.5),)


def test_settings_come_back_as_they_were() -> None:
    settings = ControllerSettings(idle_block_s=math.inf, max_nodes=3, caps={'user anna': 2})
    assert from_json(to_json(settings), ControllerSettings) == settings


@pytest.mark.parametrize(
    'text',
    [
        'no JSON',
        '7',
        '[7]',
        '[{}]',
        '[{"kind":"Nothing"}]',
        '[{"kind":"Tick"}]',
        '[{"kind":"Tick","at":"now"}]',
        '[{"kind":"AbandonFragment","trainer":"a","fragment":1}]',
    ],
)
def test_what_is_no_event_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match='is not a list of events'):
        decode_events(text)
    with pytest.raises(BadInput, match='is not a record of ControllerSettings'):
        from_json('{"horizon_s": -1}', ControllerSettings)

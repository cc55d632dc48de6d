"""The controller: events in, actions out.

It holds no thread, file or clock, so the live executor and the replay of a recorded trace drive the same
object. Rescaling is done at fragment boundaries: a trainer that should have another number of nodes is asked
to stop, and starts again on the new ones when its fragment has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatchmethod

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.allocation import Allocator
from parsl_freetrain.core.blocks import blocks_to_open, idle_blocks
from parsl_freetrain.core.decision import Planner
from parsl_freetrain.core.objectives import Metric
from parsl_freetrain.core.pool import Node
from parsl_freetrain.core.profile import Profile
from parsl_freetrain.core.state import BlockState, ControllerSettings, ControllerState, Reply, TrainerState
from parsl_freetrain.core.words import BlockRequest

# So many times the setting 'stalls': holes that are all too short may be bad luck.
FRUITLESS = 4


class Controller:
    """Decides which trainer runs on which nodes, and which blocks are open.

    Parameters
    ----------
    allocator
        Solves the allocation problem; asked at every event that changes it.
    settings
        See :class:`~parsl_freetrain.core.state.ControllerSettings`; None: its defaults.
    metric
        The objective, where it is not the one that the settings name; it may depend on the trainer, but not on time.

    Raises
    ------
    BadInput
        If the settings name an unknown metric.
    """

    def __init__(self, allocator: Allocator, settings: ControllerSettings | None = None,
                 metric: Metric | None = None) -> None:
        self.settings = settings or ControllerSettings()
        self.state = ControllerState(self.settings.trainers_at_a_time, self.settings.min_hole_s)
        self._planner = Planner(allocator, self.settings, metric)

    def handle(self, event: ev.Event) -> Reply:
        """Take in one event; what is to be done now, in order.

        Events that come late or twice, or are about something unknown, change nothing. An ``OpenBlock`` counts once
        its ``BlockOpened`` has come: that has to be handled before the next ``HolesSeen``.

        Raises
        ------
        ValueError
            If a trainer is submitted while another one of its name has not ended.
        BadInput
            If ``TotalKnown`` says that there is nothing to train.
        TypeError
            If the event is of no known class.
        """
        return self.handle_all((event,))

    def handle_all(self, events: Sequence[ev.Event]) -> Reply:
        """Take in what happened in one instant, in this order, and decide once.

        So no decision counts on nodes that are known to be going, nor overlooks some that are known to come. All events
        carry the same time. Otherwise as :meth:`handle`.
        """
        actions: list[ev.Action] = []
        triggers: dict[str, None] = {}
        for event in events:
            follow, decide = self._take_in(event)
            actions += follow
            if decide:
                triggers[type(event).__name__] = None
        if not events:
            return Reply()
        at = events[-1].at
        reply = self._planner.decide(self.state, at, '+'.join(triggers)) if triggers else Reply()
        actions += reply.actions
        actions += idle_blocks(self.state, self.settings, at)
        return Reply(tuple(actions), reply.decision)

    @singledispatchmethod
    def _take_in(self, event: ev.Event) -> tuple[list[ev.Action], bool]:
        """Update the state; actions that follow whatever the allocation, and whether to ask for a new one."""
        raise TypeError(f'The controller does not know the event {event!r}.')

    @_take_in.register
    def _(self, event: ev.HolesSeen) -> tuple[list[ev.Action], bool]:
        return list(blocks_to_open(self.state, self.settings, event.at, event.holes)), False

    @_take_in.register
    def _(self, event: ev.BlockOpened) -> tuple[list[ev.Action], bool]:
        if event.block in self.state.closed:
            return [], False
        known = self.state.blocks.setdefault(event.block, BlockState(event.request))
        known.request = event.request  # nodes may have joined before it was told
        return [], False

    @_take_in.register
    def _(self, event: ev.NodesJoined) -> tuple[list[ev.Action], bool]:
        if event.block in self.state.closed:
            return [], False
        block = self.state.blocks.setdefault(event.block, BlockState(BlockRequest(len(event.nodes))))
        block.nodes.update(event.nodes)
        block.arrived.update(event.nodes)
        # A node that joins after a notice does not know of it: the earlier end holds.
        until_s = min((end for end in (block.until_s, event.until_s) if end is not None), default=None)
        if block.until_s is None:
            block.until_s = until_s
        for node in event.nodes:
            if node not in self.state.pool.nodes:
                self.state.pool.join(Node(node, event.block, until_s))
        return [], True

    @_take_in.register
    def _(self, event: ev.BlockEndKnown) -> tuple[list[ev.Action], bool]:
        block = self.state.blocks.get(event.block)
        if block is None or block.until_s == event.until_s:
            return [], False
        block.until_s = event.until_s
        for node in sorted(block.nodes):
            self.state.pool.join(Node(node, event.block, event.until_s))
            if holder := self.state.pool.holder.get(node):
                self.state.changed[holder] = None
        return self._stop_before_notice(event, block), True

    def _stop_before_notice(self, event: ev.BlockEndKnown, block: BlockState) -> list[ev.Action]:
        """Fragments whose own deadline is later than the new end have to be told to stop."""
        actions: list[ev.Action] = []
        for name, trainer in self.state.trainers.items():
            running = trainer.running
            if (running and not running.stopping and not running.broken and event.until_s is not None
                    and not block.nodes.isdisjoint(running.nodes)
                    and (running.deadline_s is None or running.deadline_s > event.until_s)):
                self.state.stop(name, running)
                actions.append(ev.StopFragment(name, running.number, 'notice: its nodes are about to be taken'))
        return actions

    @_take_in.register
    def _(self, event: ev.NodesLeft) -> tuple[list[ev.Action], bool]:
        return self._lose(event.nodes), True

    @_take_in.register
    def _(self, event: ev.BlockClosed) -> tuple[list[ev.Action], bool]:
        self.state.closed.add(event.block)
        block = self.state.blocks.pop(event.block, None)
        return (self._lose(sorted(block.nodes)), True) if block else ([], False)

    def _lose(self, gone: Sequence[str]) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for name, trainer in self.state.lose(gone).items():
            assert trainer.running is not None
            actions.append(ev.AbandonFragment(name, trainer.running.number))
        return actions

    @_take_in.register
    def _(self, event: ev.TrainerSubmitted) -> tuple[list[ev.Action], bool]:
        trainer = event.trainer
        if trainer.name in self.state.trainers:
            raise ValueError(f'Trainer {trainer.name!r} is running already.')
        self.state.submit(trainer.name, TrainerState(
            trainer, event.samples, event.fragments, Profile(trainer.curve), waiting_since=event.at, reached=event.samples))
        return [], True

    @_take_in.register
    def _(self, event: ev.TotalKnown) -> tuple[list[ev.Action], bool]:
        if known := self.state.trainers.get(event.trainer):
            known.trainer = replace(known.trainer, total_samples=event.total_samples)
        return [], False

    @_take_in.register
    def _(self, event: ev.FragmentProgressed) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None or trainer.running is None or trainer.running.number != event.fragment:
            return [], False
        trainer.reached = event.samples
        if event.rate is None:
            return [], False
        if trainer.profile.stated is None:
            self.state.changed[event.trainer] = None
        return [], trainer.profile.observe(len(trainer.running.nodes), event.rate)

    @_take_in.register
    def _(self, event: ev.Rescaled) -> tuple[list[ev.Action], bool]:
        if trainer := self.state.trainers.get(event.trainer):
            trainer.measured.rescaled(up=event.after > event.before, seconds=event.seconds)
            self.state.changed[event.trainer] = None
        return [], False

    @_take_in.register
    def _(self, event: ev.FragmentTimed) -> tuple[list[ev.Action], bool]:
        if trainer := self.state.trainers.get(event.trainer):
            trainer.measured.timed(event.start_s, event.step_s, event.checkpoint_s)
            self.state.changed[event.trainer] = None
            self.state.timed()
        return [], False

    @_take_in.register
    def _(self, event: ev.FragmentEnded) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None or trainer.running is None or trainer.running.number != event.fragment:
            return [], False
        ended = self.state.end(event.trainer, trainer)
        progressed = event.samples > ended.from_samples
        trainer.samples = trainer.reached = max(trainer.samples, event.samples)
        trainer.waiting_since = event.at
        if progressed:
            trainer.stalled = trainer.fruitless = 0
        if event.ending is ev.Ending.FINISHED:
            return [self._end(trainer, 'finished')], True
        if trainer.cancelled:
            return [self._end(trainer, 'cancelled')], True
        if event.ending is ev.Ending.FAILED:
            trainer.errors += 1
            if trainer.errors > self.settings.retries:
                return [self._end(trainer, 'failed', event.error)], True
        if event.ending is ev.Ending.PREEMPTED and not ended.broken and not progressed:
            trainer.stalled += 1
            if trainer.stalled >= self.settings.stalls:
                return [self._end(trainer, 'failed', (
                    f'{trainer.stalled} fragments in a row died without progress though none of their nodes was lost; '
                    f'the last one, fragment {event.fragment}: {event.error}'))], True
        if event.ending is ev.Ending.PREEMPTED and ended.used_up(event.at) and not progressed:
            trainer.fruitless += 1
            if trainer.fruitless >= FRUITLESS * self.settings.stalls:
                return [self._end(trainer, 'failed', (
                    f'{trainer.fruitless} fragments in a row, up to fragment {event.fragment}, had their nodes until the hole ended '
                    f'without getting one global batch trained and saved: a step is longer than the holes; use a smaller '
                    f'batch_size, more nodes (min_nodes), or holes that last longer (min_hole_s)'))], True
        return [], True

    @_take_in.register
    def _(self, event: ev.TrainerCancelled) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None or trainer.cancelled:
            return [], False
        self.state.cancel(event.trainer)
        if trainer.running is None:
            return [self._end(trainer, 'cancelled')], True
        if trainer.running.stopping or trainer.running.broken:
            return [], True
        self.state.stop(event.trainer, trainer.running)
        return [ev.StopFragment(event.trainer, trainer.running.number, 'cancelled')], True

    @_take_in.register
    def _(self, event: ev.OrdinaryWork) -> tuple[list[ev.Action], bool]:
        self.state.ordinary = event.outstanding
        return [], False

    @_take_in.register
    def _(self, event: ev.Tick) -> tuple[list[ev.Action], bool]:
        return [], True

    @_take_in.register
    def _(self, event: ev.ShutdownRequested) -> tuple[list[ev.Action], bool]:
        self.state.shutting_down = True
        actions: list[ev.Action] = []
        for name, trainer in self.state.trainers.items():
            if trainer.running and not trainer.running.stopping and not trainer.running.broken:
                self.state.stop(name, trainer.running)
                actions.append(ev.StopFragment(name, trainer.running.number, 'shutdown'))
        return actions, False

    def _end(self, trainer: TrainerState, state: str, why: str = '') -> ev.EndTrainer:
        self.state.remove(trainer.trainer.name)
        return ev.EndTrainer(trainer.trainer.name, state, why)

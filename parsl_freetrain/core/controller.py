"""The controller: events in, actions out.

It holds no thread, file or clock, so the live executor and the replay of a recorded trace drive the same
object. Rescaling is done at fragment boundaries: a trainer that should have another number of nodes is asked
to stop, and starts again on the new ones when its fragment has ended.
"""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatchmethod

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.allocation import Allocator
from parsl_freetrain.core.assignment import FreeNode
from parsl_freetrain.core.blocks import blocks_to_open, idle_blocks
from parsl_freetrain.core.decision import Planner
from parsl_freetrain.core.profile import Profile
from parsl_freetrain.core.state import BlockState, ControllerSettings, ControllerState, Reply, TrainerState
from parsl_freetrain.core.words import BlockRequest


class Controller:
    """Decides which trainer runs on which nodes, and which blocks are open.

    Parameters
    ----------
    allocator
        Solves the allocation problem; asked at every event that changes it.
    settings
        See :class:`~parsl_freetrain.core.state.ControllerSettings`; None: its defaults.

    Raises
    ------
    BadInput
        If the settings name an unknown metric.
    """

    def __init__(self, allocator: Allocator, settings: ControllerSettings | None = None) -> None:
        self.settings = settings or ControllerSettings()
        self.state = ControllerState()
        self._planner = Planner(allocator, self.settings)

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
        actions, decide = self._take_in(event)
        reply = self._planner.decide(self.state, event) if decide else Reply()
        actions += reply.actions
        actions += idle_blocks(self.state, self.settings, event.at)
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
            self.state.nodes[node] = FreeNode(node, event.block, until_s)
        return [], True

    @_take_in.register
    def _(self, event: ev.BlockEndKnown) -> tuple[list[ev.Action], bool]:
        block = self.state.blocks.get(event.block)
        if block is None or block.until_s == event.until_s:
            return [], False
        block.until_s = event.until_s
        for node in block.nodes:
            self.state.nodes[node] = FreeNode(node, event.block, event.until_s)
        return self._stop_before_notice(event, block), True

    def _stop_before_notice(self, event: ev.BlockEndKnown, block: BlockState) -> list[ev.Action]:
        """Fragments whose own deadline is later than the new end have to be told to stop."""
        actions: list[ev.Action] = []
        for name, trainer in self.state.trainers.items():
            running = trainer.running
            if (running and not running.stopping and not running.broken and event.until_s is not None
                    and not block.nodes.isdisjoint(running.nodes)
                    and (running.deadline_s is None or running.deadline_s > event.until_s)):
                running.stopping = True
                actions.append(ev.StopFragment(name, running.number, 'notice: its nodes are about to be taken'))
        return actions

    @_take_in.register
    def _(self, event: ev.NodesLeft) -> tuple[list[ev.Action], bool]:
        return self._lose(set(event.nodes)), True

    @_take_in.register
    def _(self, event: ev.BlockClosed) -> tuple[list[ev.Action], bool]:
        self.state.closed.add(event.block)
        block = self.state.blocks.pop(event.block, None)
        return (self._lose(set(block.nodes)), True) if block else ([], False)

    def _lose(self, gone: set[str]) -> list[ev.Action]:
        for node in gone:
            left = self.state.nodes.pop(node, None)
            if left and left.block in self.state.blocks:
                self.state.blocks[left.block].nodes.discard(node)
        actions: list[ev.Action] = []
        for name, trainer in self.state.trainers.items():
            if trainer.running and not trainer.running.broken and not gone.isdisjoint(trainer.running.nodes):
                trainer.running.broken = True
                actions.append(ev.AbandonFragment(name, trainer.running.number))
        return actions

    @_take_in.register
    def _(self, event: ev.TrainerSubmitted) -> tuple[list[ev.Action], bool]:
        trainer = event.trainer
        if trainer.name in self.state.trainers:
            raise ValueError(f'Trainer {trainer.name!r} is running already.')
        self.state.trainers[trainer.name] = TrainerState(
            trainer, event.samples, event.fragments, Profile(trainer.curve))
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
        changed = event.rate is not None and trainer.profile.observe(len(trainer.running.nodes), event.rate)
        return [], changed

    @_take_in.register
    def _(self, event: ev.FragmentEnded) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None or trainer.running is None or trainer.running.number != event.fragment:
            return [], False
        ended, trainer.running = trainer.running, None
        progressed = event.samples > ended.from_samples
        trainer.samples = max(trainer.samples, event.samples)
        if progressed:
            trainer.stalled = 0
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
        return [], True

    @_take_in.register
    def _(self, event: ev.TrainerCancelled) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None or trainer.cancelled:
            return [], False
        trainer.cancelled = True
        if trainer.running is None:
            return [self._end(trainer, 'cancelled')], True
        if trainer.running.stopping or trainer.running.broken:
            return [], True
        trainer.running.stopping = True
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
                trainer.running.stopping = True
                actions.append(ev.StopFragment(name, trainer.running.number, 'shutdown'))
        return actions, False

    def _end(self, trainer: TrainerState, state: str, why: str = '') -> ev.EndTrainer:
        del self.state.trainers[trainer.trainer.name]
        return ev.EndTrainer(trainer.trainer.name, state, why)

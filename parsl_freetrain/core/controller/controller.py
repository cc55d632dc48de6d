"""The controller: events in, actions out, without thread, file or clock, live and in a replay. A
trainer is rescaled between two fragments: one is asked to stop, the next starts on the new nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatchmethod

from parsl_freetrain.core.allocation.objectives import Metric
from parsl_freetrain.core.allocation.problem import Allocator
from parsl_freetrain.core.controller import controller_state as cs
from parsl_freetrain.core.controller import trainer_end
from parsl_freetrain.core.controller.block_policy import blocks_to_open, charges_spent, idle_blocks
from parsl_freetrain.core.controller.node_pool import PoolNode
from parsl_freetrain.core.controller.nodes_to_give import give_back, releases
from parsl_freetrain.core.controller.planner import Planner
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.types import CORRECTED_S, BlockRequest

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # after failures in a row

BUDGET_SPENT, PAUSE_OVER = 'BudgetSpent', 'PauseOver'  # triggers that are no event


class DecisionFailed(FreeTrainError, RuntimeError):
    """The allocator failed to answer; ``actions`` are to be carried out all the same."""

    def __init__(self, actions: tuple[ev.Action, ...], error: Exception) -> None:
        why = ' '.join(str(error).split()).removesuffix('.') or type(error).__name__
        super().__init__(f'The allocator failed: {why}. Nothing new is decided until it answers.')
        self.actions = actions


class Controller:
    """Decides which trainer runs on which nodes, and which blocks are open. ``metric``: an
    objective in place of the settings'; it may not depend on time. BadInput if theirs is unknown.
    """

    def __init__(
        self,
        allocator: Allocator,
        settings: ControllerSettings | None = None,
        metric: Metric | None = None,
    ) -> None:
        self.settings = settings or ControllerSettings()
        self.state = cs.ControllerState(self.settings)
        self._planner = Planner(allocator, self.settings, metric)

    def handle(self, event: ev.Event) -> cs.Reply:
        """Process one event; return the actions to take now, in order. Events that come late or
        twice, or concern something unknown, change nothing; an ``OpenBlock`` counts from its
        ``BlockOpened`` on. Raises ValueError for a trainer whose name another open one has,
        TypeError for an unknown event.
        """
        return self.handle_all((event,))

    def handle_all(self, events: Sequence[ev.Event], at: float | None = None) -> cs.Reply:
        """Process all events of an instant, and decide once; or DecisionFailed."""
        if not events:
            return cs.Reply()
        at = events[-1].at if at is None else at
        actions: list[ev.Action] = []
        triggers: dict[str, None] = {}
        for event in events:
            follow, decide = self._take_in(event)
            actions += follow
            if decide:
                triggers[type(event).__name__] = None
        if self.state.end_pauses(at):
            triggers[PAUSE_OVER] = None
        if stopped := trainer_end.stop_spent(self.state, at):
            actions += stopped
            triggers[BUDGET_SPENT] = None
        released = releases(self.state, at)
        # While nodes are given back, a decision waits for the fragments that end for it.
        giving_back = released or (actions and any(isinstance(e, ev.NodesNeeded) for e in events))
        reply = cs.Reply()
        if triggers and not giving_back:
            try:
                reply = self._planner.decide(self.state, at, '+'.join(triggers))
            except Exception as error:
                raise DecisionFailed(tuple(actions), error) from error
        actions += [*reply.actions, *released, *idle_blocks(self.state, at)]
        return cs.Reply(tuple(actions), reply.decision)

    @singledispatchmethod
    def _take_in(self, event: ev.Event) -> tuple[list[ev.Action], bool]:
        """Update the state: actions apart from the allocation, and whether that must be new."""
        raise TypeError(f'The controller does not know the event {event!r}.')

    @_take_in.register
    def _(self, event: ev.HolesSeen) -> tuple[list[ev.Action], bool]:
        why = charges_spent(self.state, event.at, event.holes)
        if why and not self.state.ordinary:
            return trainer_end.dismiss_all(self.state, why), True
        return list(blocks_to_open(self.state, event.at, event.holes)), False

    @_take_in.register
    def _(self, event: ev.BlockOpened) -> tuple[list[ev.Action], bool]:
        if event.block in self.state.closed:
            return [], False
        known = self.state.blocks.setdefault(event.block, cs.BlockState(event.request))
        known.request = event.request  # nodes may join before this event
        return [], False

    @_take_in.register
    def _(self, event: ev.BlockStarted) -> tuple[list[ev.Action], bool]:
        if block := self.state.blocks.get(event.block):
            block.begun_s = event.since_s
        return [], False

    @_take_in.register
    def _(self, event: ev.NodesJoined) -> tuple[list[ev.Action], bool]:
        if event.block in self.state.closed:
            return [], False
        unknown = cs.BlockState(BlockRequest(len(event.nodes)))
        block = self.state.blocks.setdefault(event.block, unknown)
        block.nodes.update(event.nodes)
        block.arrived.update(event.nodes)
        # More than asked for: the scheduler has refused to take back what was given.
        block.request = replace(block.request, nodes=max(block.request.nodes, len(block.nodes)))
        # A node that joins after a notice does not know about it: the earlier end holds.
        ends = [end for end in (block.until_s, event.until_s) if end is not None]
        until_s = min(ends, default=None)
        if block.until_s is None:
            block.until_s = until_s
        if any(yielded.block == event.block for yielded in self.state.yielded.values()):
            until_s = event.at  # it may be one of those that are given back
        for node, host in zip(event.nodes, event.hosts or event.nodes, strict=True):
            if node not in self.state.pool.nodes:
                new = PoolNode(node, event.block, until_s, event.node_class, host, event.at)
                self.state.pool.join(new)
                self.state.see_class(event.node_class)
        return [], True

    @_take_in.register
    def _(self, event: ev.BlockEndKnown) -> tuple[list[ev.Action], bool]:
        block = self.state.blocks.get(event.block)
        if block is None or block.until_s == event.until_s:
            return [], False
        until_s = math.inf if event.until_s is None else event.until_s
        taken = until_s < (block.until_s or 0.0) - CORRECTED_S
        block.until_s = event.until_s
        if taken and not block.arrived:
            # A scheduler's signal before a preemption may not reach a node that is starting.
            return [ev.CloseBlock(event.block, 'its nodes are taken before they have joined')], True
        for node in sorted(block.nodes - self.state.yielded.keys()):  # those stay given back
            known = self.state.pool.nodes.get(node) or PoolNode(node, event.block, None)
            self.state.pool.join(replace(known, until_s=event.until_s))
            if holder := self.state.pool.holder.get(node):
                self.state.changed[holder] = None
        return self._stop_before_notice(event, block), True

    def _stop_before_notice(self, event: ev.BlockEndKnown, block: cs.BlockState) -> list[ev.Action]:
        """Stop the fragments whose own deadline is later than the block's new end."""
        end_s, why = event.until_s, 'notice: its nodes are about to be taken'
        actions: list[ev.Action] = []
        for name, trainer in self.state.trainers.items():
            run = trainer.running
            if run is None or end_s is None or block.nodes.isdisjoint(run.nodes):
                continue
            if run.deadline_s is None or run.deadline_s > end_s:
                actions += self.state.ask_to_stop(name, why)
        return actions

    @_take_in.register
    def _(self, event: ev.NodesNeeded) -> tuple[list[ev.Action], bool]:
        return list(give_back(self.state, event)), True

    @_take_in.register
    def _(self, event: ev.NodesLeft) -> tuple[list[ev.Action], bool]:
        return self._lose(event.nodes), True

    @_take_in.register
    def _(self, event: ev.BlockRequeued) -> tuple[list[ev.Action], bool]:
        if block := self.state.blocks.get(event.block):
            self.state.charges.ended(block.request, block.begun_s, event.at)
            block.begun_s = None
            block.arrived.clear()
        return [], False

    @_take_in.register
    def _(self, event: ev.BlockClosed) -> tuple[list[ev.Action], bool]:
        self.state.closed.add(event.block)
        for node in [n for n, y in self.state.yielded.items() if y.block == event.block]:
            del self.state.yielded[node]
        block = self.state.blocks.pop(event.block, None)
        if block is None:
            return [], False
        self.state.charges.ended(block.request, block.begun_s, event.at)
        return self._lose(sorted(block.nodes)), True

    def _lose(self, gone: Sequence[str]) -> list[ev.Action]:
        lost = self.state.lose(gone).items()
        return [ev.AbandonFragment(name, one.running.number) for name, one in lost if one.running]

    @_take_in.register
    def _(self, event: ev.TrainerSubmitted) -> tuple[list[ev.Action], bool]:
        trainer = event.trainer
        if trainer.name in self.state.trainers:
            raise ValueError(f'Trainer {trainer.name!r} is running already.')
        samples, at = event.samples, event.at
        profiles = self.state.profiles_of(trainer)
        new = cs.TrainerState(trainer, samples, event.fragments, profiles, submitted_at=at)
        new.waiting_since, new.reached = at, samples
        for one in self.state.siblings(trainer):
            new.measured = one.measured
        self.state.submit(trainer.name, new)
        return [], True

    @_take_in.register
    def _(self, event: ev.TotalKnown) -> tuple[list[ev.Action], bool]:
        if known := self.state.trainers.get(event.trainer):
            known.trainer = replace(known.trainer, total_samples=event.total_samples)
        return [], False

    @_take_in.register
    def _(self, event: ev.RoundKnown) -> tuple[list[ev.Action], bool]:
        if known := self.state.trainers.get(event.trainer):
            for one in (known, *self.state.siblings(known.trainer)):
                one.trainer = replace(one.trainer, round_samples=event.round_samples)
                if one.running is None:
                    self.state.check_gate(one)
        return [], False

    @_take_in.register
    def _(self, event: ev.ReplicaReached) -> tuple[list[ev.Action], bool]:
        self.state.reached_elsewhere(event)
        return [], True

    @_take_in.register
    def _(self, event: ev.FragmentProgressed) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None or trainer.running is None or trainer.running.number != event.fragment:
            return [], False
        trainer.reached = event.samples
        if event.rate is None:
            return [], False
        if trainer.trainer.round_samples or not trainer.profiles.stated:
            for one in (trainer, *self.state.siblings(trainer.trainer)):
                self.state.changed[one.trainer.name] = None
        learned = trainer.learn(event.rate)
        running, nodes = trainer.running, len(trainer.running.nodes)
        why = trainer.shapes.change(nodes, running.shape)
        if not why or running.ending(event.at, self.state.shortest_s):
            return [], learned
        self.state.stop(event.trainer, running)
        return [ev.StopFragment(event.trainer, running.number, why, running.nodes)], True

    @_take_in.register
    def _(self, event: ev.Rescaled) -> tuple[list[ev.Action], bool]:
        if trainer := self.state.trainers.get(event.trainer):
            trainer.measured.rescaled(up=event.after > event.before, seconds=event.seconds)
            self.state.changed[event.trainer] = None
        return [], False

    @_take_in.register
    def _(self, event: ev.FragmentEnded) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is not None:
            trainer.measured.timed(event.start_s, event.step_s, event.checkpoint_s)
            self.state.changed[event.trainer] = None
            self.state.timed()
        if trainer is None or trainer.running is None or trainer.running.number != event.fragment:
            return [], False
        ended = self.state.end(event.trainer, trainer, event.at)
        progressed = event.samples > ended.from_samples
        trainer.samples = trainer.reached = max(trainer.samples, event.samples)
        trainer.waiting_since = event.at
        if progressed:
            trainer.stalled = trainer.fruitless = trainer.failures = 0
        self.state.check_gate(trainer)
        if event.ending is ev.Ending.FINISHED:
            return trainer_end.end_trainer(self.state, trainer, 'finished'), True
        if trainer.dismissed:
            end = trainer.dismissed
            return trainer_end.end_trainer(self.state, trainer, end.state, end.why), True
        if why := trainer_end.why_it_fails(trainer, ended, event, self.settings):
            return trainer_end.end_trainer(self.state, trainer, 'failed', why), True
        # A replica stops where a checkpoint of another one has turned out to be damaged.
        stopped = event.ending is ev.Ending.STOPPED and not trainer.trainer.training
        accident = not stopped and not event.out_of_memory
        if accident and not ended.broken and not progressed:
            if why := self.state.misses_state(trainer, ended):
                return trainer_end.end_trainer(self.state, trainer, 'failed', why), True
            trainer.failures += 1
            if trainer.failures > 1:  # wait twice as long each time, since causes may pass
                pause_s = min(FIRST_PAUSE_S * 2 ** (trainer.failures - 2), LONGEST_PAUSE_S)
                self.state.pause(event.trainer, event.at + pause_s)
        return [], True

    @_take_in.register
    def _(self, event: ev.TrainerCancelled) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None or (trainer.dismissed and trainer.dismissed.state == 'cancelled'):
            return [], False
        return trainer_end.dismiss(self.state, trainer, 'cancelled'), True

    @_take_in.register
    def _(self, event: ev.TrainerAborted) -> tuple[list[ev.Action], bool]:
        trainer = self.state.trainers.get(event.trainer)
        if trainer is None:
            return [], False
        actions: list[ev.Action] = []
        if trainer.running is not None:
            actions.append(ev.AbandonFragment(event.trainer, trainer.running.number))
            self.state.end(event.trainer, trainer, event.at)
        return [*actions, *trainer_end.end_trainer(self.state, trainer, 'failed', event.why)], True

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
        asked = (self.state.ask_to_stop(name, 'shutdown') for name in self.state.trainers)
        return [stop for stops in asked for stop in stops], False

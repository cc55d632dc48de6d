"""From events to states of runs. Events that come twice, or of unknown things, do nothing."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, get_args

from msgspec import structs

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model import state as st

OfBlock = ev.BlockStarted | ev.BlockRequeued | ev.BlockEndKnown | ev.BlockClosed
OfTraining = ev.TotalKnown | ev.RoundKnown | ev.Rescaled


def fold(history: st.History, events: Iterable[ev.Event], keep_progress: bool = True) -> st.History:
    """Take in events; returns the same history. Fragments may keep only their last report."""
    runs = history.runs
    run = runs[-1] if runs else None
    for event in events:
        kind = type(event)
        if kind is ev.RunBegan:
            assert isinstance(event, ev.RunBegan)
            number = 1 + (runs[-1].id if runs else 0)
            run = st.RunState(number, event, event.at, keeps_progress=keep_progress)
            runs.append(run)
            history.latest = number
        elif run is not None:
            if event.at > run.last_at:
                run.last_at = event.at
            if (step := _STEPS.get(kind)) is not None:
                step(run, event)
    return history


def _block_opened(run: st.RunState, event: ev.BlockOpened) -> None:
    lasts_s = event.request.walltime_s
    until = None if lasts_s is None else event.at + lasts_s
    run.blocks[event.block] = st.Block(run.id, event, until=until)


def _block(run: st.RunState, event: OfBlock) -> None:
    if block := run.blocks.get(event.block):
        match event:
            case ev.BlockStarted():
                block.begun = event.since_s
            case ev.BlockRequeued():
                block.used.append((block.begun, event.at))
                block.begun = None
            case ev.BlockEndKnown():
                block.until = event.until_s
            case ev.BlockClosed() if block.closed_at is None:
                block.closed_at, block.how = event.at, event.how


def _nodes_joined(run: st.RunState, event: ev.NodesJoined) -> None:
    for node, name in zip(event.nodes, event.hosts or event.nodes, strict=True):
        if (known := run.nodes.get(node)) is not None:  # it is back
            known.left_at = known.how = None
        else:
            run.nodes[node] = st.Node(run.id, node, event.block, name, event.at)


def _nodes_left(run: st.RunState, event: ev.NodesLeft) -> None:
    for name in event.nodes:
        if (node := run.nodes.get(name)) and node.left_at is None:
            node.left_at, node.how = event.at, event.how


def _submitted(run: st.RunState, event: ev.TrainerSubmitted) -> None:
    trainer = event.trainer
    new = st.Training(run.id, trainer, event, event.samples, 'queued', event.at)
    run.trainers[trainer.name] = new


def _training(run: st.RunState, event: OfTraining) -> None:
    if training := run.trainers.get(event.trainer):
        match event:
            case ev.TotalKnown():
                training.trainer = replace(training.trainer, total_samples=event.total_samples)
            case ev.RoundKnown():
                for one in run.replicas(training):
                    one.trainer = replace(one.trainer, round_samples=event.round_samples)
                    one.weights_by = one.weights_by if event.made_by is None else event.made_by
            case ev.Rescaled():
                training.rescaled.append(event)


def _launched(run: st.RunState, event: ev.FragmentLaunched) -> None:
    training = run.trainers.get(event.trainer)
    if training is None:
        return
    names = dict(training.trainer.shapes).get(len(event.nodes), ())
    fragment = st.Fragment(run.id, event, names[event.shape] if event.shape < len(names) else '')
    before = run.fragments.get((event.trainer, event.fragment))
    run.fragments[event.trainer, event.fragment] = fragment
    if before is not None:  # its number was given again
        training.fragments.remove(before)
    training.fragments.append(fragment)
    if not event.failed:
        _change(run, event.trainer, 'running', event.at)


def _started(run: st.RunState, event: ev.FragmentStarted) -> None:
    if fragment := run.fragments.get((event.trainer, event.fragment)):
        fragment.started_at, fragment.started_samples = event.at, event.samples


def _progressed(run: st.RunState, event: ev.FragmentProgressed) -> None:
    fragment = run.fragments.get((event.trainer, event.fragment))
    if fragment is not None:
        fragment.seen = event
        if run.keeps_progress:
            fragment.progress.append(event)


def _saved(run: st.RunState, event: ev.CheckpointSaved) -> None:
    saved = event.checkpoint
    run.checkpoints.append(saved)
    if fragment := run.fragments.get((saved.trainer, saved.fragment)):
        fragment.checkpoints.append(saved)
    if training := run.trainers.get(saved.trainer):
        training.samples = saved.samples
        training.resumes, training.verified = saved.resumes, saved.verified


def _fragment_ended(run: st.RunState, event: ev.FragmentEnded) -> None:
    fragment = run.fragments.get((event.trainer, event.fragment))
    if fragment is not None:
        fragment.ended = event
    why = f'waits for a file system: {event.error}' if event.storage else ''
    _change(run, event.trainer, 'queued', event.at, why)
    if training := run.trainers.get(event.trainer):
        training.samples = event.samples if event.committed is None else event.committed


def _change(run: st.RunState, trainer: str, state: str, at: float, why: str = '') -> None:
    training = run.trainers.get(trainer)
    if training is not None and not training.over:
        training.state, training.state_at, training.why = state, at, why


def _decided(run: st.RunState, event: ev.Decided) -> None:
    for action in event.actions:
        if type(action) is ev.EndTrainer:
            _change(run, action.trainer, action.state, event.at, action.why)
    if event.trigger:
        run.decisions.append(event)
        if len(run.decisions) > st.PROBLEMS_KEPT:
            late = -1 - st.PROBLEMS_KEPT
            if run.decisions[late].problem:
                run.decisions[late] = structs.replace(run.decisions[late], problem=b'')


_STEPS: dict[type[ev.Event], Callable[[st.RunState, Any], None]] = {
    ev.BlockOpened: _block_opened,
    **dict.fromkeys(get_args(OfBlock), _block),
    ev.BlockRefused: lambda run, event: run.refused.append(event),
    ev.NodesJoined: _nodes_joined,
    ev.NodesLeft: _nodes_left,
    ev.NodeUnusable: lambda run, event: run.unusable.append(event),
    ev.NodesNeeded: lambda run, event: setattr(run, 'needed', event),
    ev.OffersSeen: lambda run, event: run.offers.update(
        ((offer.node, offer.start), offer) for offer in event.offers
    ),
    ev.TrainerSubmitted: _submitted,
    **dict.fromkeys(get_args(OfTraining), _training),
    ev.ReplicaReached: lambda run, event: run.elsewhere.setdefault(event.training, {}).update(
        {event.trainer: event.samples}
    ),
    ev.FragmentLaunched: _launched,
    ev.FragmentStarted: _started,
    ev.FragmentProgressed: _progressed,
    ev.CheckpointSaved: _saved,
    ev.FragmentEnded: _fragment_ended,
    ev.TrainerInterrupted: lambda run, event: _change(run, event.trainer, 'interrupted', event.at),
    ev.Decided: _decided,
    ev.RunEnded: lambda run, event: setattr(run, 'ended', event),
}

"""Seeded runs of the whole controller side on a virtual clock. ``python -m
tests.simulation.test_simulation FIRST LAST`` runs these seeds; one that fails prints its journal.
"""

import logging
import sys
import traceback

import pytest

from parsl_freetrain.core.model import events as ev
from tests.simulation.world import FAULTS_S, World


def run(seed: int) -> World:
    """Raises AssertionError, with the journal as a note, if a promise is broken. One of 100 seeds
    has 64 nodes at once, and one blocks that end after some seconds; one of 8 learns rates.
    """
    nodes, stay_s = {0: (64, None), 1: (16, 4.0)}.get(seed % 100, (0, None))
    world = World(seed, nodes, stay_s, quick=seed % 8 != 7)
    try:
        world.run()
    except BaseException as error:
        journal = '\n'.join(f'{one.at - world.begun_at:9.3f} {one}'[:400] for one in world.said)
        error.add_note(f'seed {seed} at {world.now - world.begun_at:.3f} s\n{journal[-8000:]}')
        raise
    return world


def test_short_runs_keep_every_promise() -> None:
    for seed in range(2, 10):
        run(seed)


@pytest.mark.long
def test_many_short_runs_keep_every_promise() -> None:
    for seed in range(1000, 1040):
        run(seed)


def test_a_broken_promise_is_noticed_though_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(world: World, action: object) -> None:
        raise AssertionError('planted')

    monkeypatch.setattr(World, '_started', refuse)
    with pytest.raises(AssertionError, match='planted'):
        run(7)


@pytest.mark.long
def test_many_nodes_come_at_once_and_trainers_change_their_nodes_every_second() -> None:
    joined = [len(event.nodes) for event in run(0).said if isinstance(event, ev.NodesJoined)]
    assert sum(joined) >= 64
    world = run(1)
    begun = [event.at for event in world.said if isinstance(event, ev.FragmentLaunched)]
    assert sum(at < world.begun_at + FAULTS_S for at in begun) >= 50


def test_the_same_seed_gives_the_same_run() -> None:
    def told(world: World) -> list[object]:
        return [(type(event), event.at) for event in world.said]

    assert told(run(7)) == told(run(7))


def main(first: int, last: int) -> int:
    logging.getLogger('parsl_freetrain').propagate = False
    failed = 0
    for seed in range(first, last):
        try:
            run(seed)
        except BaseException as error:
            failed += 1
            print(f'seed {seed}: {type(error).__name__}: {str(error)[:600]}', flush=True)
            if failed == 1 and last - first == 1:
                traceback.print_exc()
    print(f'{last - first} runs, {failed} failed')
    return failed


if __name__ == '__main__':
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)

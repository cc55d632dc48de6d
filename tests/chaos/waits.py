"""Who waits for whom, for how long, and what then: see docs/evidence/waits.md."""

from typing import NamedTuple

from parsl_freetrain.core.controller.trainer_end import STORAGE_S
from parsl_freetrain.executor import parsl_side, run_lock, stream
from parsl_freetrain.executor.block import block_record
from parsl_freetrain.executor.fragment import control_channel, fragment_state, members
from parsl_freetrain.executor.settings import Timeouts
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.training.comm import collectives, exchange_watch
from parsl_freetrain.training.process import fork_client


class Wait(NamedTuple):
    """``limit_s``: in seconds, with the defaults; ``setting``: by which it can be changed."""

    who: str
    waits_for: str
    limit_s: float
    then: str
    setting: str = ''


def waits() -> tuple[Wait, ...]:
    """All of them; from the submitting process to ranks and files."""
    t, batch = Timeouts(), BatchOptions()
    exchange_s = collectives.EXCHANGE_TIMEOUT.total_seconds()
    ex, rank, node, run = 'the executor', 'a rank', 'a node', 'a run'
    # fmt: off
    return (
        Wait(ex, 'the scheduler to answer a command', batch.command_s,
             'it is asked again, later each time; blocks stay as last seen', 'command_s'),
        Wait(ex, 'the scheduler to answer at all', batch.unreachable_s,
             'blocks count as unreachable; nothing is resubmitted', 'unreachable_s'),
        Wait(ex, 'a block to get its nodes', batch.withdraw_s,
             'the block is withdrawn', 'withdraw_s'),
        Wait(ex, 'a cancelled job to be accepted as such', block_record.AGAIN_S,
             'the cancellation is repeated, later each time'),
        Wait(ex, 'the first node of a block that runs', t.join_s,
             'the block is given back', 'join_s'),
        Wait(ex, "a node's worker to answer its first task", t.join_s,
             'the node is unusable; a block without another node is given back', 'join_s'),
        Wait(ex, 'the first step of a fragment', t.start_s,
             'the fragment is ended', 'start_s'),
        Wait(ex, 'a first word of a node whose fragment is ended', fragment_state.LONE_ANSWER_S,
             'the node is lost'),
        Wait(ex, 'the next step of a fragment', t.step_s, 'the fragment is ended', 'step_s'),
        Wait(ex, 'a sign of life of a node', t.silence_s, 'the node is lost', 'hang_s'),
        Wait(ex, 'a node that others have lost touch with', fragment_state.LONE_ANSWER_S,
             'the node is lost'),
        Wait(ex, 'the result of a node whose ranks have ended', t.silence_s,
             'the node is lost', 'hang_s'),
        Wait(ex, 'a rank to end after SIGKILL', t.silence_s, 'its node is lost', 'hang_s'),
        Wait(ex, 'the other ranks when one has failed', t.peer_s, 'they are killed', 'peer_s'),
        Wait(ex, 'a fragment that was asked to stop', t.stop_s, 'its ranks are killed', 'stop_s'),
        Wait(ex, 'ranks that are to run ahead', members.AHEAD_S, 'the fragment stops without them'),
        Wait(ex, 'files beside its ledger', stream.FILES_S,
             'it goes on, and keeps its events in memory until the file system answers'),
        Wait(ex, "Parsl's interchange", parsl_side.INTERCHANGE_S,
             'all trainers fail; a new run goes on'),
        Wait(node, 'its fork server', fork_client.LAUNCH_S,
             'the node is unusable, or its fragment ends'),
        Wait(node, 'the executor to take a message', control_channel.SEND_S,
             'its ranks are killed'),
        Wait(node, 'a rank that is stopped', t.hang_s / 2, 'the rank is killed', 'hang_s'),
        Wait(node, 'a new run, when the submitting process is gone', t.adopt_s,
             'the block ends', 'adopt_s'),
        Wait(rank, 'the address of rank 0', collectives.RENDEZVOUS_TIMEOUT_S, 'the fragment ends'),
        Wait(rank, 'the acknowledgement of what it has sent', 0.6 * t.hang_s,
             'the fragment ends', 'hang_s'),
        Wait(rank, 'another rank in an exchange', exchange_s, 'the fragment ends'),
        Wait(rank, 'all others, which wait as well', exchange_watch.LEAST_S,
             'the fragment ends, and the error names the exchanges'),
        Wait('a trainer', 'a file system in trouble', STORAGE_S,
             'it fails; every try is a fragment, and status says why it waits'),
        Wait(run, 'another run that begins in the same folder', run_lock.CLAIM_S, 'it is refused'),
        Wait(run, 'a sign of life of a run on another computer', run_lock.SILENT_S,
             'it takes the folder over'),
    )
    # fmt: on

"""Slurm's words for states (man squeue, JOB STATE CODES), and node lists ``cn[01-03,7],login1``."""

import math
import re
import signal
from itertools import product

from parsl_freetrain.sites.batch.records import JobState, NotUnderstood

_WORDS = {
    JobState.PENDING: 'PENDING',
    JobState.HELD: 'RESV_DEL_HOLD REQUEUE_FED REQUEUED REQUEUE_HOLD SPECIAL_EXIT EXPEDITING',
    JobState.STARTING: 'CONFIGURING POWER_UP_NODE',
    JobState.RUNNING: 'RUNNING RESIZING SIGNALING',
    JobState.SUSPENDED: 'SUSPENDED STOPPED',
    JobState.ENDING: 'COMPLETING STAGE_OUT',
    JobState.COMPLETED: 'COMPLETED',
    JobState.FAILED: 'FAILED',
    JobState.TIMED_OUT: 'TIMEOUT',
    JobState.PREEMPTED: 'PREEMPTED',
    JobState.CANCELLED: 'CANCELLED REVOKED',
    JobState.DEADLINE: 'DEADLINE',
    JobState.NODE_FAILED: 'NODE_FAIL LAUNCH_FAILED RECONFIG_FAIL',
    JobState.BOOT_FAILED: 'BOOT_FAIL',
    JobState.OUT_OF_MEMORY: 'OUT_OF_MEMORY',
}
_STATES = {word: state for state, words in _WORDS.items() for word in words.split()}

_OF_SHELL = 128  # a shell's status for a command that a signal ended is this and the signal


def end_of(state: JobState, status: int, signal_number: int) -> JobState:
    """Given how its first process ended. SIGTERM ends a starting block: FAILED to Slurm."""
    told = signal_number == signal.SIGTERM or status == _OF_SHELL + signal.SIGTERM
    return JobState.TERMINATED if state is JobState.FAILED and told else state


def state_of(words: str) -> JobState:
    """The state in Slurm's words, such as ``CANCELLED by 0`` or, cut off, ``OUT_OF_ME+``."""
    word = words.split()[0] if words.strip() else ''
    if word.endswith('+'):
        word = next((name for name in _STATES if name.startswith(word[:-1])), '')
    return _STATES.get(word, JobState.UNKNOWN)


MOST_NODES = 1_000_000  # a list that names more is no list of nodes
_NOTHING = ('', '(null)', 'None', 'N/A', 'n/a')


def expand(text: str) -> tuple[str, ...]:
    """A compressed list's nodes, in order; NotUnderstood for brackets that do not match."""
    if text.strip() in _NOTHING:
        return ()
    return tuple(name for word in _words(text.strip()) for name in _names(word))


def _words(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    if not re.fullmatch(r'(?:[^][]|\[[^][]*\])*', text):
        raise NotUnderstood(f'the brackets of the node list {text[:80]!r} do not match')
    return re.findall(r'(?:^|,)((?:[^][,]|\[[^]]*\])*)', text)


def _names(word: str) -> list[str]:
    parts = re.split(r'\[([^\]]*)\]', word)  # text, numbers, text, numbers, ..., text
    if len(parts) == 1:
        return [word]
    choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
    if math.prod(map(len, choices)) > MOST_NODES:
        raise NotUnderstood(f'the node list {word[:80]!r} has more than {MOST_NODES:,} nodes')
    return [''.join(choice) for choice in product(*choices)]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(','):
        first, dash, last = part.partition('-')
        if not first.isdecimal() or (dash and not last.isdecimal()):
            where = f'{part!r} in the node list [{text[:80]}]'
            raise NotUnderstood(f'{where} is not a number or a range of numbers')
        if len(text) > MOST_NODES or len(last) > 9 or int(last or first) - int(first) > MOST_NODES:
            raise NotUnderstood(f'the node list [{text[:80]}] is too long')
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers

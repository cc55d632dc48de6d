"""Slurm's compressed node lists: ``cn[01-03,7],login1``."""

from __future__ import annotations

import re
from itertools import product

from parsl_freetrain.sites.batch.records import NotUnderstood

_NOTHING = ('', '(null)', 'None', 'N/A', 'n/a')


def expand(text: str) -> tuple[str, ...]:
    """Every node of a compressed list, in its order; several brackets in one name are allowed.

    Raises
    ------
    NotUnderstood
        The brackets don't match or do not hold numbers.
    """
    if text.strip() in _NOTHING:
        return ()
    return tuple(name for word in _words(text.strip()) for name in _names(word))


def _words(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    words, depth, begin = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == '[') - (char == ']')
        if depth not in (0, 1):
            raise NotUnderstood(f'the brackets of the node list {text[:80]!r} do not match')
        if char == ',' and not depth:
            words.append(text[begin:place])
            begin = place + 1
    if depth:
        raise NotUnderstood(f'the brackets of the node list {text[:80]!r} do not match')
    return [*words, text[begin:]]


def _names(word: str) -> list[str]:
    parts = re.split(r'\[([^\]]*)\]', word)  # text, numbers, text, numbers, ..., text
    if len(parts) == 1:
        return [word]
    choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return [''.join(choice) for choice in product(*choices)]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(','):
        first, dash, last = part.partition('-')
        if not first.isdigit() or (dash and not last.isdigit()):
            raise NotUnderstood(
                f'{part!r} in the node list [{text[:80]}] is not a number or a range of numbers'
            )
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers

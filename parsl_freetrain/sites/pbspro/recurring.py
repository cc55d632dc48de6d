"""Reservations that recur (``pbs_rsub -r``). pbs_rstat tells the next occurrence, the rule of RFC
5545, and how many there are, but not the nodes of later ones, which mostly get the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, tzinfo
from itertools import islice
from zoneinfo import ZoneInfo

MOST, DAYS = 10, 400  # occurrences that are looked for, and how far ahead
_WEEK = 'MO', 'TU', 'WE', 'TH', 'FR', 'SA', 'SU'
_KNOWN = {'FREQ', 'INTERVAL', 'COUNT', 'UNTIL', 'BYDAY', 'BYHOUR'}


def later_starts(fields: Mapping[str, str], start_s: float) -> tuple[float, ...]:
    """When the next occurrences begin after the one at ``start_s``; ``fields`` as pbs_rstat tells
    them. Where not all of a rule is known there are rather more than it has. May raise ValueError.
    """
    if not (text := fields.get('reserve_rrule', '')):
        return ()
    rule = dict(part.upper().split('=', 1) for part in text.split(';') if part)
    left = int(fields.get('reserve_count', MOST + 1)) - int(fields.get('reserve_index', 1))
    ordinals = any(day[:-2] for day in rule.get('BYDAY', '').split(','))
    most = min(left, MOST) if rule.keys() <= _KNOWN and not ordinals else MOST
    begin = datetime.fromtimestamp(start_s, _zone(fields.get('Variable_List', '')))
    return tuple(at.timestamp() for at in islice(_starts(rule, begin), max(most, 0)))


def _zone(variables: str) -> tzinfo | None:
    """That of the user, in which the rule is meant; None: this computer's."""
    named = dict(part.partition('=')[::2] for part in variables.split(','))
    try:
        return ZoneInfo(named['PBS_TZID'])
    except (LookupError, ValueError, OSError):
        return None


def _starts(rule: Mapping[str, str], begin: datetime) -> Iterator[datetime]:
    often, interval = rule.get('FREQ', 'HOURLY'), max(1, int(rule.get('INTERVAL', 1)))
    step = timedelta(hours=1) if often == 'HOURLY' or 'BYHOUR' in rule else timedelta(days=1)
    days = {_WEEK.index(day[-2:]) for day in rule.get('BYDAY', '').split(',') if day}
    hours = {int(hour) for hour in rule.get('BYHOUR', '').split(',') if hour}
    monday = begin.toordinal() - begin.weekday()
    for number in range(1, int(timedelta(days=DAYS) / step)):
        at = begin + number * step
        if f'{at - timedelta(days=1):%Y%m%d}' > rule.get('UNTIL', '9')[:8]:  # of another zone
            return
        months = 12 * (at.year - begin.year) + at.month - begin.month
        passed = {
            'HOURLY': number,
            'DAILY': at.toordinal() - begin.toordinal(),
            'WEEKLY': (at.toordinal() - monday) // 7,
            'MONTHLY': months,
            'YEARLY': months / 12,
        }.get(often, 0)
        if passed % interval or (days and at.weekday() not in days):
            continue
        if not days and often == 'WEEKLY' and at.weekday() != begin.weekday():
            continue
        monthly = often in ('MONTHLY', 'YEARLY') and not days and 'BYMONTHDAY' not in rule
        if not (monthly and at.day != begin.day) and (not hours or at.hour in hours):
            yield at

"""Reservations that recur (``pbs_rsub -r``): the next one, and the RFC 5545 rule."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo, available_timezones

MOST, DAYS = 10, 400  # occurrences that are looked for, and how far ahead
_OFTEN = 'HOURLY', 'DAILY', 'WEEKLY', 'MONTHLY', 'YEARLY'
_WEEK = 'MO', 'TU', 'WE', 'TH', 'FR', 'SA', 'SU'
_KNOWN = {'FREQ', 'INTERVAL', 'COUNT', 'UNTIL', 'BYDAY', 'BYHOUR'}


def later_starts(fields: Mapping[str, str], start_s: float) -> tuple[float, ...]:
    """When the occurrences after that at ``start_s`` begin; too many where a rule is not known."""
    if not (text := fields.get('reserve_rrule', '')):
        return ()
    rule = dict(part.upper().split('=', 1) for part in text.split(';') if part)
    left = int(fields.get('reserve_count', MOST + 1)) - int(fields.get('reserve_index', 1))
    known = rule.keys() <= _KNOWN
    ordinals = any(day[:-2] for day in rule.get('BYDAY', '').split(','))
    most = min(left, MOST) if known and not ordinals else MOST
    named = dict(part.partition('=')[::2] for part in fields.get('Variable_List', '').split(','))
    zone = ZoneInfo(named['PBS_TZID']) if named.get('PBS_TZID') in available_timezones() else None
    begin = datetime.fromtimestamp(start_s, zone)
    return tuple(at.timestamp() for at in islice(_starts(rule, begin, known), max(most, 0)))


def _starts(rule: Mapping[str, str], begin: datetime, known: bool) -> Iterator[datetime]:
    often, interval = rule['FREQ'], max(1, int(rule.get('INTERVAL', 1)))
    if often not in _OFTEN or rule.keys() & {'BYMINUTE', 'BYSECOND'}:
        raise ValueError('a rule by the minute')
    step = timedelta(hours=1) if often == 'HOURLY' or 'BYHOUR' in rule else timedelta(days=1)
    days = {_WEEK.index(day[-2:]) for day in rule.get('BYDAY', '').split(',') if day}
    hours = {int(hour) for hour in rule.get('BYHOUR', '').split(',') if hour}
    monday = begin.toordinal() - begin.weekday()
    for number in range(1, int(timedelta(days=DAYS) / step)):
        at = begin + number * step
        if f'{at - timedelta(days=1):%Y%m%d}' > rule.get('UNTIL', '9')[:8]:  # of another zone
            return
        months = 12 * (at.year - begin.year) + at.month - begin.month
        days_on, weeks = at.toordinal() - begin.toordinal(), (at.toordinal() - monday) // 7
        passed = number, days_on, weeks, months, at.year - begin.year
        if passed[_OFTEN.index(often)] % interval or (days and at.weekday() not in days):
            continue
        alike = (
            days
            or not known
            or (
                (often != 'WEEKLY' or at.weekday() == begin.weekday())
                and (often not in ('MONTHLY', 'YEARLY') or at.day == begin.day)
                and (often != 'YEARLY' or at.month == begin.month)
            )
        )
        if alike and (not hours or at.hour in hours):
            yield at

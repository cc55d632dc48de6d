"""The files of this package, and its pages as templates that escape outside text."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from parsl_freetrain.report.axes import duration, number


def resource(name: str) -> str:
    return (files('parsl_freetrain.report') / name).read_text(encoding='utf-8')


def source_of(text: str) -> str:
    """The source expression of an inline style sheet or script for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def template(name: str) -> Template:
    """A page of this package; inserted text is escaped unless it is ``Markup``."""
    environment = Environment(
        loader=PackageLoader('parsl_freetrain', 'report'),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        clipped=clipped, date=date, duration=duration, number=number, percent=percent
    )
    return environment.get_template(name)


def clipped(text: str, most: int = 400) -> str:
    """The text without control characters, with at most ``most`` characters."""
    plain = ''.join(c if c.isprintable() else ' ' for c in text)
    return plain if len(plain) <= most else plain[: most - 1] + '…'


def percent(part: float, whole: float) -> str:
    return f'{100 * part / whole:.1f} %' if whole else '–'


def date(at: float) -> str:
    """A time in epoch seconds as local date and time."""
    return datetime.fromtimestamp(at).astimezone().strftime('%Y-%m-%d %H:%M:%S %Z')

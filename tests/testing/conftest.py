"""The fork server of the training tests."""

from __future__ import annotations

from tests.training.conftest import warm

__all__ = ['warm']

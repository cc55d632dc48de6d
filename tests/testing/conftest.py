"""The fork server of the training tests."""

from __future__ import annotations

from tests.training.conftest import fork_server

__all__ = ['fork_server']

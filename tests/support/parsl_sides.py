"""Parsl's side of an executor, for tests without Parsl."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.parsl_side import ParslSide


class NoParsl(ParslSide):
    """Has no managers, and starts nothing. ``submit`` gets the payloads."""

    def __init__(
        self, submit: Callable[[dict[str, Any], bytes], Any] = lambda context, buffer: Future()
    ) -> None:
        self._sent = submit

    def open(self, request: BlockRequest) -> tuple[str, str]:
        raise AssertionError(f'A block was to be opened: {request}')

    def register(self, job_id: str) -> tuple[str, str]:
        return f'block-{job_id}', f'run {job_id}'

    def submit(self, context: dict[str, Any], buffer: bytes) -> Any:
        return self._sent(context, buffer)

    def managers(self) -> list[dict[str, Any]]:
        return []

    def end_manager(self, name: str) -> None:
        raise AssertionError(f'There is no manager {name}.')

    def statuses(self) -> dict[str, Any]:
        return {}

    def trouble(self) -> str:
        return ''

    def fail_all(self, why: str) -> None:
        raise AssertionError(why)

"""Handles requests of other programs of the same user."""

from __future__ import annotations

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.fragment.runner import FragmentRunner
from parsl_freetrain.executor.requests import Answer, Cancel, Preempt, Request, Requests
from parsl_freetrain.executor.stream import Stream


class RequestHandler:
    """Answers requests. Only the event loop's thread calls :meth:`look`."""

    def __init__(self, requests: Requests, fragments: FragmentRunner, stream: Stream) -> None:
        self._requests, self._fragments, self._stream = requests, fragments, stream

    def look(self, at: float) -> None:
        for request_id, request in self._requests.new():
            try:
                answer = Answer(True, self._fulfil(request, at))
            except BadInput as error:
                answer = Answer(False, str(error))
            self._requests.answer(request_id, answer)

    def _fulfil(self, request: Request, at: float) -> str:
        """Fulfil a request; returns a sentence that says what was done."""
        name, records = request.trainer, self._fragments.records
        if name not in records:
            raise BadInput(
                f'There is no trainer {name!r} in this run; it has '
                f'{", ".join(map(repr, records)) or "none"}.'
            )
        match request:
            case Preempt():
                return self._fragments.rehearse(name, request.grace_s, at)
            case Cancel():
                if (future := records[name].future).done():
                    raise BadInput(f'Trainer {name!r} is {future.state} already.')
                self._stream.emit(ev.TrainerCancelled(at, name))
                return (
                    f'Trainer {name!r} is being cancelled; what it has trained is kept in '
                    f'{records[name].store}.'
                )

"""What the user's other programs ask of a live run: private JSON files beside its ledger."""

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host import files
from parsl_freetrain.host.ownership import refuse_foreign
from parsl_freetrain.report.runs import trainer_named

if TYPE_CHECKING:  # those who ask need neither
    from parsl_freetrain.executor.fragment.runner import FragmentRunner
    from parsl_freetrain.executor.stream import Stream

logger = logging.getLogger(__name__)

_REQUEST, _ANSWER, _PART = '.request', '.answer', '.part'
_LARGEST = 64_000  # bytes
_WHAT = 'folder of requests'
_LOOK_S = 0.1
_CHECK_S = 1.0


class Preempt(msgspec.Struct, frozen=True, tag='preempt', forbid_unknown_fields=True):
    """End the trainer's running fragment, ``grace_s`` seconds after a notice."""

    trainer: str
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Cancel(msgspec.Struct, frozen=True, tag='cancel', forbid_unknown_fields=True):
    trainer: str


Request = Preempt | Cancel


class RequestAnswer(msgspec.Struct, frozen=True):
    done: bool
    sentence: str


def requests_folder(ledger: Path) -> Path:
    return ledger.parent / 'requests'


class Requests:
    """The live run's end. ``folder``: made and cleared; BadInput if others may write to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            files.make_dir(folder)
        except FileExistsError:
            raise BadInput(f'{folder} must be a folder of yours: remove what is there.') from None
        refuse_foreign(folder, _WHAT)
        for path in folder.iterdir():
            if path.suffix in (_REQUEST, _ANSWER, _PART):
                path.unlink(missing_ok=True)

    def new(self) -> list[tuple[str, Request]]:
        """Requests since the last call with their ids, oldest first; cheap if there are none."""
        found = []
        for path in sorted(self._folder.glob(f'*{_REQUEST}')):
            try:
                request: Request = msgspec.json.decode(files.read(path, _LARGEST), type=Request)
                found.append((path.stem, request))
            except (BadInput, OSError, ValueError) as error:
                logger.warning('A request was not understood: %s: %s', path, error)
            path.unlink(missing_ok=True)
        return found

    def answer(self, request_id: str, answer: RequestAnswer) -> None:
        try:
            files.replace(self._folder / f'{request_id}{_ANSWER}', msgspec.json.encode(answer))
        except OSError:
            logger.warning('Request %s could not be answered', request_id, exc_info=True)


class RequestHandler:
    """Answers requests. Only the event loop's thread calls :meth:`look`."""

    def __init__(self, requests: Requests, fragments: 'FragmentRunner', stream: 'Stream') -> None:
        self._requests, self._fragments, self._stream = requests, fragments, stream
        self._found: list[tuple[str, Request]] = []
        self._answers: list[tuple[str, RequestAnswer]] = []

    def look(self, at: float) -> None:
        if not self._stream.beside(self._exchange):
            return
        found, self._found = self._found, []
        for request_id, request in found:
            try:
                answer = RequestAnswer(True, self._fulfil(request, at))
            except BadInput as error:
                answer = RequestAnswer(False, str(error))
            self._answers.append((request_id, answer))
        if found:
            self._stream.beside(self._exchange)

    def _exchange(self) -> None:
        while self._answers:
            self._requests.answer(*self._answers.pop(0))
        self._found += self._requests.new()

    def _fulfil(self, request: Request, at: float) -> str:
        """Fulfil a request; returns a sentence that says what was done."""
        records = self._fragments.records
        name = trainer_named(records, request.trainer)
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


def ask(
    ledger: Path,
    asked: Request,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Ask the live run of ``ledger``, and wait; BadInput from ``check``, or without an answer."""
    folder = requests_folder(ledger)
    if not ledger.is_file() or not folder.is_dir():
        raise BadInput(
            f'There is no run with the ledger {ledger}: name the ledger.journal in the '
            'checkpoint_dir of a running workflow.'
        )
    refuse_foreign(folder, _WHAT)
    name = f'{time.time_ns():020}-{secrets.token_hex(8)}'  # in their order
    request, answer = folder / f'{name}{_REQUEST}', folder / f'{name}{_ANSWER}'
    files.replace(request, msgspec.json.encode(asked))
    deadline, checked_at = clock() + timeout_s, clock()
    try:
        while clock() < deadline:
            if answer.exists():
                said = msgspec.json.decode(files.read(answer, _LARGEST), type=RequestAnswer)
                if not said.done:
                    raise BadInput(said.sentence)
                return said.sentence
            if clock() - checked_at >= _CHECK_S:
                check()
                checked_at = clock()
            time.sleep(_LOOK_S)
        raise BadInput(
            f'No run answered within {timeout_s:g} s at {folder}: the workflow that keeps this '
            'ledger is not running any more, or it is too busy.'
        )
    finally:
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)

"""Messages to and from a node's fork server."""

from collections.abc import Mapping

from parsl_freetrain.core.model.events import Count, Seconds
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Message, ProcessId, Status


class Launch(Message, frozen=True):
    """Fork a rank, or use a matching standby rank; the payload of this digest follows. ``wait_s``:
    fork a standby rank, which waits so long at most.
    """

    order: FragmentOrder
    place: RankPlace
    env: Mapping[str, str]
    payload: str
    wait_s: Seconds | None = None


class ForkServerWanted(Message, frozen=True):
    """Fork a server as the asking process would have started it, for the same Python."""

    name: str
    owner_pid: ProcessId
    log: str
    env: Mapping[str, str]
    path: list[str]
    cwd: str
    cpus: list[Count]
    prefix: str
    version: str


class Ping(Message, frozen=True):
    """Answer when ready."""


class Quit(Message, frozen=True):
    """End, and end all ranks."""


class OfferState(Message, frozen=True):
    """Left by a rank that lost another; answered by :class:`StateWanted`, or the end."""

    trainer: str
    fragment: Count
    samples: Count
    part: Count = 0
    alone: bool = False


class KeepState(Message, frozen=True):
    """Keep a ``file`` of a state in memory (its descriptor follows) unless ``offer`` is outdone."""

    trainer: str
    digest: str
    offer: OfferState | None
    file: str


class FetchState(Message, frozen=True):
    """Send the file with this digest, as a file descriptor. ``keep``: it is wanted again."""

    trainer: str
    digest: str
    keep: bool


ForkRequest = Launch | ForkServerWanted | Ping | Quit | OfferState | KeepState | FetchState


class Ready(Message, frozen=True):
    pid: ProcessId
    devices: Count = 0


class StateWanted(Message, frozen=True):
    """The answer to :class:`OfferState`: send it by :class:`KeepState`."""


class StateKept(Message, frozen=True):
    """The answer to :class:`KeepState`."""


class Refused(Message, frozen=True):
    """No fork of this process can serve as the requested fork server."""

    why: str


class Serving(Message, frozen=True):
    """The requested fork server is running, or another one with its name."""


class ForkServerEnded(Message, frozen=True):
    status: Status


ForkAnswer = Ready | StateWanted | StateKept | Refused | Serving | ForkServerEnded

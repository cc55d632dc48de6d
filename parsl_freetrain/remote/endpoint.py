"""``python -m parsl_freetrain.remote.endpoint``: an order on standard input, its answer out."""

import os
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.state import FINAL_STATES
from parsl_freetrain.executor.run_lock import FILE, check_name, refuse_live
from parsl_freetrain.host import files
from parsl_freetrain.host.ownership import refuse_foreign
from parsl_freetrain.host.processes import start_of
from parsl_freetrain.remote import orders
from parsl_freetrain.training.process import probe
from parsl_freetrain.training.process.block_lease import read_holder

LABEL = 'ordered'  # label of the executor whose run takes orders
BEGIN_S = 120.0  # a run may have to import from a slow file system
_LARGEST = 16_000_000  # bytes of a file


class Desk:
    """The orders of one checkpoint folder. Raises BadInput if another user could write there."""

    def __init__(self, checkpoint_dir: str) -> None:
        self.checkpoint_dir = Path(checkpoint_dir)
        self.folder = self.checkpoint_dir / '.orders'
        files.make_dir(self.folder)
        refuse_foreign(self.folder, 'folder of orders')

    def place(self, order: orders.Order) -> None:
        """Put an order there, once; BadInput if another trainer of its name goes on."""
        name = order.trainer
        check_name(name)
        known = self.status(name)
        if known is not None and known.request == order.request:
            return
        draft = self.path(secrets.token_hex(8), 'draft')  # the run must not read half of it
        files.replace(draft, msgspec.msgpack.encode(order))
        try:
            os.link(draft, self.path(name, 'order'))
        except FileExistsError:
            if self.order(name).request == order.request:
                return
            raise BadInput(
                f'Trainer {name!r} is {known.state if known else "queued"} there, from another '
                'submission: attach to it, cancel it first, or give this one another trainer_name.'
            ) from None
        finally:
            draft.unlink()
        self.tell(name, orders.TrainerStatus(order.request))

    def names(self, kind: str = 'order') -> set[str]:
        return {path.stem for path in self.folder.glob(f'*.{kind}')}

    def readable(self, names: set[str]) -> list[orders.Order]:
        """The orders that can be read. One that is damaged has failed: a client sends it again."""
        found = []
        for name in sorted(names):
            with suppress(OSError):  # it is done with, or the next look reads it
                try:
                    found.append(self.order(name))
                except BadInput as error:
                    self.tell(name, orders.TrainerStatus('', 'failed', sentence=str(error)))
        return found

    def order(self, name: str) -> orders.Order:
        return orders.decoded(files.read(self.path(name, 'order'), _LARGEST), orders.Order)

    def tell(self, name: str, status: orders.TrainerStatus) -> None:
        """Say how a trainer is; its order is done with once it has ended."""
        files.replace(self.path(name, 'status'), msgspec.msgpack.encode(status), durable=False)
        if status.state in FINAL_STATES:
            for kind in ('order', 'cancel'):
                self.path(name, kind).unlink(missing_ok=True)

    def status(self, name: str) -> orders.TrainerStatus | None:
        """None if nothing is known of it, or what was is damaged."""
        with suppress(FileNotFoundError, BadInput):
            content = files.read(self.path(name, 'status'), _LARGEST)
            return orders.decoded(content, orders.TrainerStatus)
        return None

    def path(self, name: str, kind: str) -> Path:
        """The file with a trainer's 'order' or 'status', or that says 'cancel'."""
        return self.folder / f'{name}.{kind}'

    def has_run(self) -> bool:
        """Raises BadInput if another program trains there."""
        try:
            refuse_live(self.checkpoint_dir)
        except BadInput:
            holder = read_holder(self.checkpoint_dir / FILE)
            if holder is not None and not holder.run.endswith(f' {LABEL}'):
                raise
            return holder is not None
        return False


def answer_to(order: orders.Order) -> orders.OrderAnswer:
    """Carry out an order. Raises BadInput if it cannot be."""
    if not order.checkpoint_dir:
        return orders.OrderAnswer(versions=probe.versions())
    desk = Desk(order.checkpoint_dir)
    if order.verb == 'train' and order.payload:
        if wrong := [c for c in probe.compare(order.versions, probe.versions()) if not c.fits]:
            said = (f'{c.name} is {c.here} here and {c.there} at the endpoint' for c in wrong)
            raise BadInput(
                f'This computer and the endpoint do not fit together: {", ".join(said)}; install '
                "the endpoint's versions here."
            )
        desk.place(order)
    elif order.verb == 'cancel' and order.trainer in desk.names():
        files.replace(desk.path(order.trainer, 'cancel'), b'')
    if names := desk.names():
        _ensure_run(desk)
    until = time.monotonic() + order.hold_s
    while names and desk.names() == names and time.monotonic() < until:
        time.sleep(0.2)
    asked = [order.trainer] if order.trainer else sorted(desk.names('status'))
    found = {name: desk.status(name) for name in asked}
    return orders.OrderAnswer(trainers={name: one for name, one in found.items() if one})


def _ensure_run(desk: Desk) -> None:
    """Start a folder's run unless it goes on. Raises BadInput if another program trains there."""
    if desk.has_run():
        return
    worker = os.getppid()  # which ends with the job that it is in
    words = (str(desk.checkpoint_dir), str(worker), start_of(worker))
    command = [sys.executable, '-m', 'parsl_freetrain.remote.run', *words]
    with os.fdopen(files.open_log(desk.folder / 'log.txt'), 'wb') as log:
        how: Any = {'stdin': subprocess.DEVNULL, 'stdout': log, 'stderr': log}
        run = subprocess.Popen(command, cwd=desk.folder, start_new_session=True, **how)
    until = time.monotonic() + BEGIN_S
    while run.poll() is None and time.monotonic() < until and not desk.has_run():
        time.sleep(0.1)
    if run.poll():
        said = (desk.folder / 'log.txt').read_text(errors='replace').strip()[-1000:]
        raise BadInput(f'The run in {desk.checkpoint_dir} could not be started: {said}')
    run.returncode = 0  # nobody here waits for its end


if __name__ == '__main__':
    try:
        reply = answer_to(orders.decoded(sys.stdin.buffer.read(), orders.Order))
    except FreeTrainError as error:
        reply = orders.OrderAnswer(str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(reply))

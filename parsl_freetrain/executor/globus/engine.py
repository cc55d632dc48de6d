"""FreeTrainEngine: a Globus Compute endpoint that trains in holes.

:mod:`parsl_freetrain.executor.globus.registration` registers it as an engine type.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import typeguard
from globus_compute_common import messagepack
from globus_compute_common.messagepack.message_types import Result, Task
from globus_compute_endpoint.engines.base import GCExecutorFuture
from globus_compute_endpoint.engines.globus_compute import GlobusComputeEngine
from msgspec import structs

from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.globus.protocol import BAD_INPUT, ORDER, Answer, Order
from parsl_freetrain.executor.globus.service import TrainerService
from parsl_freetrain.executor.settings import INTERCHANGE, HtexOptions, Policy, Recording, Timeouts
from parsl_freetrain.sites.named import load_site_file, site_files
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.registry import site_types

PROVIDER = ('max_blocks', 'min_hole_s', 'worker_init')
GROUPS: dict[str, type[Settings]] = {
    'recording': Recording,
    'policy': Policy,
    'timeouts': Timeouts,
    'htex': HtexOptions,
}


class FreeTrainEngine(GlobusComputeEngine):  # type: ignore[misc]
    """Runs trainers that a :class:`~parsl_freetrain.remote.FreeTrainClient` submits, and ordinary
    Globus Compute tasks beside them, in holes.

    Parameters
    ----------
    site
        ``{'name': 'polaris', …}``: a file of ``site_configs/`` by name, and the arguments of its
        function ``site()``; ``{'type': 'slurm', …}``: a type of site (see
        :mod:`parsl_freetrain.sites.registry`) and its settings; or a
        :class:`~parsl_freetrain.sites.protocols.Site`.
    checkpoint_dir
        Absolute path of a folder on a file system that all nodes share.
    label
        Name of the engine, in its logs and of its batch jobs.
    max_blocks, min_hole_s, worker_init
        As in :class:`~parsl_freetrain.sites.provider.BackfillProvider`.
    max_retries_on_system_failure, working_dir, run_in_sandbox, allowed_serializers, encrypted
        As in GlobusComputeEngine. The first four apply to ordinary tasks only.
    **settings
        As in :class:`~parsl_freetrain.executor.FreeTrainExecutor`. The groups ``policy``,
        ``timeouts`` and ``htex`` may be mappings of their settings.

    Raises
    ------
    BadInput
        If a setting cannot be used.
    """

    def __init__(
        self,
        *,
        site: Any,
        checkpoint_dir: str,
        label: str | None = None,
        encrypted: bool = True,
        max_retries_on_system_failure: int = 0,
        working_dir: str | os.PathLike[str] = 'tasks_working_dir',
        run_in_sandbox: bool = False,
        allowed_serializers: Sequence[Any] | None = None,
        **settings: Any,
    ) -> None:
        folder = Path(checkpoint_dir).expanduser()
        if not folder.is_absolute():
            raise BadInput(
                f'FreeTrainEngine: checkpoint_dir is {checkpoint_dir!r}; it must be an '
                'absolute path, since an endpoint may be '
                f'started anywhere.'
            )
        for_provider = {name: settings.pop(name) for name in PROVIDER if name in settings}
        for name, group in GROUPS.items():
            if isinstance(given := settings.get(name), Mapping):
                settings[name] = group(**_with_tuples(given))
        htex = structs.replace(settings.pop('htex', HtexOptions()), encrypted=encrypted)
        try:
            executor = FreeTrainExecutor(
                provider=BackfillProvider(site=site_of(site), **for_provider),
                checkpoint_dir=str(folder),
                label=f'{label or "FreeTrainEngine"}-FreeTrainExecutor',
                htex=htex,
                **settings,
            )
        except (typeguard.TypeCheckError, TypeError) as error:
            raise BadInput(f'FreeTrainEngine: {error}.') from error
        super().__init__(
            executor=executor,
            label=label,
            encrypted=encrypted,
            max_retries_on_system_failure=max_retries_on_system_failure,
            working_dir=working_dir,
            run_in_sandbox=run_in_sandbox,
            allowed_serializers=allowed_serializers,
            job_status_kwargs={'strategy': 'none'},
        )  # the executor opens and closes its blocks itself
        self._service: TrainerService | None = None

    def _get_compute_ix_launch_cmd(self) -> list[str]:
        """The command of our interchange. Globus Compute would start Parsl's, which cannot pin
        fragments to nodes.
        """
        return list(INTERCHANGE)

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Start the executor with a run id of its own, since there is no Parsl DataFlowKernel to
        give it one.
        """
        self.executor.run_id = str(uuid.uuid4())
        super().start(*args, **kwargs)
        self._service = TrainerService(self.executor)

    def _submit(
        self,
        resource_specification: dict[str, Any],
        func: Any,
        packed_task: bytes,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> GCExecutorFuture:
        if ORDER not in resource_specification:
            return super()._submit(resource_specification, func, packed_task, args, kwargs)
        assert self._service is not None
        task_id, serializers = args[0], (kwargs or {}).get('result_serializers') or ()
        packed = GCExecutorFuture()
        packed.executor_task_id = f'order-{task_id}'

        def pack(said: Answer) -> None:
            packed.set_result(
                messagepack.pack(
                    Result(
                        task_id=task_id,
                        data=self.serde.serialize_from_list(said.to_document(), serializers),
                    )
                )
            )

        try:
            order = Order.from_json(resource_specification[ORDER])
        except BadInput as error:
            pack(Answer(BAD_INPUT, str(error)))
            return packed
        taken: Future[Answer] = self._service.take(order, lambda: self._payload(packed_task))
        taken.add_done_callback(lambda done: pack(done.result()))
        return packed

    def _payload(self, packed_task: bytes) -> bytes:
        """The text argument of an order's task. The task's function is not deserialised."""
        task = messagepack.unpack(packed_task)
        assert isinstance(task, Task)
        (payload,) = self.serde.deserialize(self.serde.unpack_buffers(task.task_buffer)[1])
        return base64.b64decode(payload)

    def shutdown(self, /, **kwargs: Any) -> None:
        """Stop every fragment with a checkpoint. The answers for their trainers say that they were
        interrupted.
        """
        if self._service is not None:
            self._service.close()
        super().shutdown(**kwargs)


def site_of(given: Any) -> Any:
    """The site that a configuration describes. A Site object is returned unchanged. ``given``: see
    :class:`FreeTrainEngine`. Raises BadInput if there is no such name or type, or its settings
    cannot be used.
    """
    if isinstance(given, str):
        given = {'name': given}
    if not isinstance(given, Mapping):
        return given
    settings = _with_tuples(given)
    kind, name = settings.pop('type', None), settings.pop('name', None)
    if name is not None:
        files = site_files()
        module = load_site_file(files[name]) if name in files else None
        if kind is not None or module is None or not hasattr(module, 'site'):
            raise BadInput(
                f'FreeTrainEngine: there is no site {name!r} with a function site(); '
                'name another file of site_configs/, '
                f'or give a type in place of a name.'
            )
        make = module.site
    elif kind in (types := site_types()):
        make = types[kind].make
    else:
        raise BadInput(
            f"FreeTrainEngine: the site's type is {kind!r}; it must be one of "
            f'{", ".join(map(repr, types))}.'
        )
    try:
        return make(**settings)
    except TypeError as error:
        raise BadInput(f'FreeTrainEngine: site {name or kind}: {error}.') from error


def _with_tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a YAML file, with tuples instead of lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }

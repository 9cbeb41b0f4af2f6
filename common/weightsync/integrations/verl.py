"""verl: two checkpoint engines, which a run chooses by configuration alone.

``checkpoint_engine.backend=weightsync`` pushes into verl's rollout servers, all of which commit or none does;
``weightsync_transfer`` gives verified weights to verl's rollout workers, and verl loads them as it always does. verl
finds both by the entry-point group ``verl.plugins``; ``checkpoint_engine.custom_backend_module`` may name this module,
too. What stands in ``checkpoint_engine.engine_kwargs.BACKEND`` are options of `Sender`.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib import metadata
from typing import Any, Final, NamedTuple

import torch

from weightsync.engine.in_process import EngineInProcess
from weightsync.errors import EngineUnreachable, SourceError, UnsupportedOption, WeightSyncError
from weightsync.integrations import verl_worker
from weightsync.integrations.verl_worker import Handover
from weightsync.tensors.layout import listed
from weightsync.trainer.sender import Sender

#: The versions whose names and behaviour this was written against.
VERSIONS: Final = ("0.9.1",)
#: The module of verl that has the base class and the registry.
_BASE: Final = "verl.checkpoint_engine.base"
#: Seconds for a server or a worker of verl to answer a call.
_ASK_S: Final = 60.0
#: Seconds that a rollout worker waits longer than the trainer's push may take, so that the trainer tells it why.
_LATER_S: Final = 60.0


class _CheckpointEngine:
    """What both have in common; `_register` derives them from verl's ``CheckpointEngine``.

    The first worker of the trainer has the sender. What verl exports are whole tensors, on every worker alike, so the
    others only take part in gathering them.
    """

    #: How verl's server adapter reads `receive_weights`.
    wire_format = "named_tensors"

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any):
        _check_version()
        self._options = options
        self._timeout_s = float(options.get("timeout_s", 300.0))
        self._rank, self._push = -1, ""
        self._sender: Sender | None = None
        self._engines: list[str] = []
        self._workers: list[Any] = []
        self._given = Handover()

    def prepare(self) -> dict[str, Any]:
        """The handle of this worker's actor."""
        import ray

        return {"worker": ray.get_runtime_context().current_actor}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` for each worker of the trainer, and for each of the rollout."""
        workers = [one["worker"] for one in metadata[actor_wg_world_size:]]
        engines = cls._find_engines(workers)
        push = secrets.token_hex(8)
        trainer: dict[str, list[Any]] = {
            "rank": list(range(actor_wg_world_size)),
            "push": [push] * actor_wg_world_size,
            "engines": [engines] * actor_wg_world_size,
            "workers": [workers] * actor_wg_world_size,
        }
        return trainer, {"push": [push] * rollout_world_size}

    @classmethod
    def _find_engines(cls, workers: Sequence[Any]) -> list[Any]:
        """What is pushed into, as `Sender` takes it."""
        raise NotImplementedError

    def init_process_group(
        self,
        push: str,
        rank: int = -1,
        engines: Sequence[Any] = (),
        workers: Sequence[Any] = (),
    ) -> None:
        """Get ready for one update. Raises what `Sender` raises."""
        self._push, self._rank, self._workers = push, rank, list(workers)
        self._given = Handover()
        names = [repr(engine) for engine in engines]
        if rank or (self._sender is not None and names == self._engines):
            return
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._sender = Sender(engines, **{"group": _alone(), **self._options})
        self._engines = names

    def finalize(self) -> None:
        """Forget the update; the sender stays for the next one."""
        self._given = Handover()

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Push what verl exports, labelled ``global_steps``. Raises `WeightSyncError`.

        It is read in this thread, to which the trainer's device belongs.
        """
        if self._rank or self._sender is None:
            for _ in weights:
                pass
            return
        try:
            # Of a generator that it could close, nothing would be left for the other workers to gather.
            self._sender.push(map(tuple, weights), version=None if global_steps is None else str(global_steps))
        except Exception as error:
            for _ in weights:
                pass
            self._tell(error if isinstance(error, WeightSyncError) else SourceError(f"{type(error).__name__}: {error}"))
            raise
        self._tell(None)

    def _tell(self, error: WeightSyncError | None) -> None:
        """Tell the rollout workers how the push ended. One that does not answer is verl's to find out."""
        import ray

        told = [worker.__ray_call__.remote(_ended, self._push, error) for worker in self._workers]
        ray.wait(told, num_returns=len(told), timeout=_ASK_S)

    def ended(self, push: str, error: WeightSyncError | None) -> None:
        """Take note of how the trainer's push ended."""
        raise NotImplementedError

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """What verl's server adapter is to load. Raises `WeightSyncError` as the trainer's push does."""
        given = self._given
        while (pair := await given.next(self._timeout_s + _LATER_S)) is not None:
            yield pair


class ServersEngine(_CheckpointEngine):
    """Pushes into verl's rollout servers; verl's server adapters have nothing to load, and note the step."""

    #: In this format, and no other, vLLM's adapter begins no load if it is given nothing.
    wire_format = "delta_flush"

    @classmethod
    def _find_engines(cls, workers: Sequence[Any]) -> list[Any]:
        names = {repr(worker) for worker in workers}
        servers = [server for server in _servers() if server.workers & names]
        if missing := names.difference(*(server.workers for server in servers)):
            raise EngineUnreachable(
                f"no server of verl in this Ray namespace has the rollout workers {listed(sorted(missing))}; "
                f"{BACKENDS[0]} pushes into vLLM alone: choose checkpoint_engine.backend={BACKENDS[1]} for others"
            )
        if without := [server.name for server in servers if not server.has_engine]:
            raise UnsupportedOption(
                f"verl starts {listed(without)} without vLLM's engine in the actor, and without weightsync's plugin: "
                f"choose checkpoint_engine.backend={BACKENDS[1]}"
            )
        if dropping := [server.name for server in servers if server.drops_weights]:
            raise UnsupportedOption(
                f"verl has {listed(dropping)} drop the weights before each update, so a failed push would leave none: "
                "set actor_rollout_ref.rollout.free_cache_engine=False"
            )
        return [server.actor for server in servers if server.leads]

    def ended(self, push: str, error: WeightSyncError | None) -> None:
        """See `_CheckpointEngine.ended`."""
        if push == self._push:
            self._given.end(error)


class TransferEngine(_CheckpointEngine):
    """Gives each rollout worker the weights, once every worker has all of them and they are verified.

    See `weightsync.protocol.in_process.AskedByCalls`: in a rollout worker it is an engine that a sender can push into.
    """

    of_this_process, host = False, ""

    def __init__(self, bucket_size: int, is_master: bool = False, *, model: str = "", **options: Any):
        if not model:
            raise UnsupportedOption(
                f"{BACKENDS[1]} checks that a push is complete, and needs the model's folder for it: set "
                f"checkpoint_engine.engine_kwargs.{BACKENDS[1]}.model, as to '${{actor_rollout_ref.model.path}}'"
            )
        if options.get("verify") == "deep":
            raise UnsupportedOption("verify='deep': only verl's server knows what it has loaded; use 'digest'")
        super().__init__(bucket_size, is_master, **options)
        self.name, self._model = "a rollout worker of verl", model
        self._engine: EngineInProcess | None = None
        self._lock = threading.Lock()

    @classmethod
    def _find_engines(cls, workers: Sequence[Any]) -> list[Any]:
        return list(workers)

    def ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """See `weightsync.protocol.in_process.AskedByCalls`."""
        with self._lock:
            if self._engine is None:
                version = metadata.version("verl")
                self._engine = verl_worker.engine(self.name, version, self._model, lambda: self._given, self._timeout_s)
        return self._engine.ask(route, body, timeout_s)

    def check_caller(self) -> None:
        """Do nothing: every thread may ask."""

    def ended(self, push: str, error: WeightSyncError | None) -> None:
        """See `_CheckpointEngine.ended`; the weights themselves end a push that has succeeded."""
        if push == self._push and error is not None:
            self._given.end(error)


#: The names of both for ``checkpoint_engine.backend``.
BACKENDS: Final = ("weightsync", "weightsync_transfer")


def _alone() -> Any:
    """A process group of this process, whose sender needs no calls of the trainer's other workers."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.new_group([distributed.get_rank()], backend="gloo", use_local_synchronization=True)


def _ended(worker: Any, push: str, error: WeightSyncError | None) -> None:
    """Runs in a rollout worker, see `_CheckpointEngine.ended`."""
    worker.checkpoint_engine.ended(push, error)


def _check_version() -> None:
    installed = metadata.version("verl")
    if installed not in VERSIONS:
        raise UnsupportedOption(
            f"weightsync.integrations.verl knows verl {', '.join(VERSIONS)}, and {installed} is installed: pip install "
            f"'verl=={VERSIONS[-1]}', or choose another checkpoint_engine.backend"
        )


# ---- verl's servers --------------------------------------------------------------------------------------------------


class _Server(NamedTuple):
    """A server actor of verl, on one host of its replica."""

    name: str
    actor: Any
    workers: frozenset[str]
    """Its rollout workers."""
    leads: bool
    """Whether it is on the first host, where the engine is."""
    has_engine: bool
    drops_weights: bool
    """Whether verl has it drop the weights before an update."""


def _servers() -> list[_Server]:
    import ray
    import ray.exceptions

    found = []
    for name in sorted(name for name in ray.util.list_named_actors() if "_server_" in name):
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it is dead, or was never one of verl's
            actor = ray.get_actor(name)
            seen = ray.get(actor.__ray_call__.remote(_describe), timeout=_ASK_S)
            found += [] if seen is None else [_Server(name, actor, *seen)]
    return found


def _describe(server: Any) -> tuple[frozenset[str], bool, bool, bool] | None:
    """Runs in a server actor: what `_Server` has from ``workers`` on; None if it is none of verl's."""
    if not hasattr(server, "workers") or not hasattr(server, "node_rank"):
        return None
    leads = server.node_rank == 0
    has_engine = not leads or hasattr(server, "engine")
    drops = leads and has_engine and server.config.free_cache_engine and server._resolve_sleep_level() > 1
    return frozenset(repr(worker) for worker in server.workers), leads, has_engine, bool(drops)


# ---- verl's registry -------------------------------------------------------------------------------------------------


def _register(base: Any) -> None:
    for backend, kind in zip(BACKENDS, (ServersEngine, TransferEngine), strict=True):
        derived = type(kind.__name__, (kind, base.CheckpointEngine), {"__module__": __name__})
        base.CheckpointEngineRegistry.register(backend)(derived)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers both once verl has imported its registry, which costs the processes that need none nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != _BASE or (spec := importlib.machinery.PathFinder.find_spec(name, path, target)) is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _register(module)

        loader.exec_module = exec_module
        return spec


if _BASE in sys.modules:
    _register(sys.modules[_BASE])
else:
    sys.meta_path.insert(0, _AfterImport())

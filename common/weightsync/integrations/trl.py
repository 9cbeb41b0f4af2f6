"""TRL: trainers with a vLLM server push through a `Sender`, and the server needs no development mode.

GRPO, RLOO and online DPO, with ``use_vllm=True, vllm_mode="server"``::

    sender = Sender(["http://127.0.0.1:8000"])
    patch(sender)
    GRPOTrainer(...)

``AsyncGRPOTrainer`` takes an object instead: ``AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(sender))``.
"""

from __future__ import annotations

import inspect
import logging
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Final

import torch
from torch import nn

from weightsync.daemon_thread import DaemonThread
from weightsync.errors import UnsupportedOption
from weightsync.trainer.results import PushResult
from weightsync.trainer.sender import Sender

#: The oldest and the newest version that is tested.
TESTED: Final = ("1.11.0", "1.16.0")
#: What is replaced or used here.
_USED: Final = {
    "VLLMClient": ("init_communicator", "update_named_params", "update_named_param", "weight_update"),
    "VLLMGeneration": ("_init_vllm", "_iter_named_params", "sync_weights"),
}

logger = logging.getLogger(__name__)


def patch(sender: Sender, **options: Any) -> None:
    """Have the trainers that are built from now on push through ``sender``, with ``options`` of `Sender.push`.

    A trainer that is built pushes its model once, so that a server or a model that does not fit is refused before
    training starts. Raises `ImportError` if TRL is missing or too old. To end it, end the process or patch again.
    """
    client, generation = _classes()
    init_vllm = inspect.unwrap(generation._init_vllm)

    def sync_weights(self: Any) -> None:
        if self.mode == "server":
            _push(sender, self, options)
        else:
            inspect.unwrap(sync_weights)(self)

    def _init_vllm(self: Any) -> None:
        init_vllm(self)
        if self.mode == "server":
            self.sync_weights()

    def init_communicator(self: Any, device: object = 0) -> None:
        sender.check_serves(self.base_url)

    def update_named_params(self: Any, metadata: object, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        sender.push(named_params, **options)

    @contextmanager
    def weight_update(self: Any) -> Iterator[None]:
        with _Handover(sender, options) as self._weightsync_handover:
            yield

    def update_named_param(self: Any, name: str, weights: torch.Tensor) -> None:
        self._weightsync_handover.give(name, weights)

    def get_server_info(self: Any) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": logprobs_mode(self)}}

    def nothing(self: Any) -> None:
        """A push drops what the server has cached, and the sender is closed by whoever made it."""

    sync_weights.__wrapped__ = inspect.unwrap(generation.sync_weights)  # type: ignore[attr-defined]
    _init_vllm.__wrapped__ = init_vllm  # type: ignore[attr-defined]
    generation.sync_weights, generation._init_vllm = sync_weights, _init_vllm
    for method in (init_communicator, update_named_params, weight_update, update_named_param, get_server_info):
        setattr(client, method.__name__, method)
    client.reset_prefix_cache = client.close_communicator = nothing


class WeightTransfer:
    """What ``AsyncGRPOTrainer`` takes as ``weight_transfer``; ``options`` are those of `Sender.push`.

    TRL sends no frozen parameters; name them in ``allow_missing``.
    """

    def __init__(self, sender: Sender, **options: Any):
        self._sender, self._options = sender, options
        #: The result of the last push.
        self.pushed: PushResult | None = None

    def init_weight_transfer(self) -> None:
        """Nothing is left to set up."""

    def pause(self) -> None:
        """Do nothing: the push pauses the server, and only for its commit."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push the pairs of ``iterator``. Raises `WeightSyncError`."""
        self.pushed = self._sender.push(iterator, **self._options)

    def resume(self) -> None:
        """Do nothing, see `pause`."""

    def destroy(self) -> None:
        """Do nothing: the sender is closed by whoever made it."""


def logprobs_mode(client: Any) -> str:
    """vLLM's ``--logprobs-mode``, seen in an answer: without the development mode, no route tells it.

    At a temperature near 0 a sampled token's processed logprob is 0, while its raw one is the model's.
    """
    asked = {"model": client.model, "prompt": [0], "max_tokens": 1, "logprobs": 0, "temperature": 0.01}
    (choice,) = client._post(f"{client.base_url}/v1/completions", json=asked)["choices"]
    return "processed_logprobs" if choice["logprobs"]["token_logprobs"][0] > -1e-3 else "raw_logprobs"


def _classes() -> tuple[Any, Any]:
    needed = f"weightsync.integrations.trl needs TRL {TESTED[0]} to {TESTED[1]}: pip install 'trl=={TESTED[1]}'"
    try:
        from trl.generation import vllm_client, vllm_generation
    except ImportError as error:
        raise ImportError(f"{needed} ({error})") from error
    found = {"VLLMClient": vllm_client.VLLMClient, "VLLMGeneration": vllm_generation.VLLMGeneration}
    version = metadata.version("trl")
    gone = [f"{kind}.{name}" for kind, names in _USED.items() for name in names if not hasattr(found[kind], name)]
    if gone:
        raise ImportError(f"{needed}; {version} is installed and lacks {', '.join(gone)}")
    if not _key(TESTED[0]) <= _key(version) <= _key(TESTED[1]):
        logger.warning("TRL %s is untested; tested are %s to %s", version, *TESTED)
    return found["VLLMClient"], found["VLLMGeneration"]


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _push(sender: Sender, generation: Any, options: dict[str, Any]) -> None:
    """Push the model of a ``VLLMGeneration``; every process of the trainer calls this."""
    alone = not sender.is_distributed
    if alone and not generation.accelerator.is_main_process:
        for _ in generation._iter_named_params():  # what the main process gathers needs all others
            pass
        return
    gathers = _must_gather(generation.model) or (alone and generation.accelerator.num_processes > 1)
    sender.push(generation._iter_named_params() if gathers else generation.model, **options)


def _must_gather(model: nn.Module) -> bool:
    """Whether TRL has to merge adapters (PEFT) or gather parameters (DeepSpeed ZeRO-3, FSDP1) before they are read."""
    merges = hasattr(model, "merge_adapter")
    return merges or any(hasattr(p, "ds_id") or "FlatParameter" in type(p).__name__ for p in model.parameters())


class _Handover:
    """Hands over tensors one at a time to a push in a thread; ``give`` returns once its tensor was read."""

    def __init__(self, sender: Sender, options: dict[str, Any]):
        if sender.is_distributed:
            raise UnsupportedOption(
                "this trainer gathers its weights in its main process: build the Sender before the trainer's processes "
                "meet, which is before its config is made"
            )
        self._sender, self._options = sender, options
        self._given: queue.Queue[tuple[str, torch.Tensor] | BaseException | None] = queue.Queue()
        self._taken: queue.Queue[None] = queue.Queue()
        self._future: Future[PushResult] = Future()

    def __enter__(self) -> _Handover:
        thread = DaemonThread("weightsync-trl")
        thread.submit(lambda: self._sender.push(self._pairs(), **self._options), self._future)
        thread.close()
        self._future.add_done_callback(lambda _: self._taken.put(None))
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._given.put(error)
        if error is None:
            self._future.result()
        else:
            self._future.exception()

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (pair := self._given.get()) is not None:
            if isinstance(pair, BaseException):
                raise pair
            yield pair
            self._taken.put(None)

    def give(self, name: str, tensor: torch.Tensor) -> None:
        self._given.put((name, tensor))
        self._taken.get()
        if self._future.done():
            self._future.result()

"""What each engine package offers to the driver of the whole engine, `front_end.FrontEnd`, of weights and adapters."""

from __future__ import annotations

from typing import Protocol

from msgspec import UNSET, structs

from weightsync.engine.rank_calls import Calls, Replies
from weightsync.errors import UnsupportedOption, WrongState
from weightsync.protocol import http
from weightsync.protocol.lockstep import Lockstep
from weightsync.protocol.lora import AdapterId


class ServedLora(Protocol):
    """The LoRA adapters of an engine, in the process that serves HTTP."""

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the pushed adapters that are served, by name."""

    def number(self, name: str) -> AdapterId:
        """What the engine calls an adapter of this name. Raises `UnsupportedOption` if it cannot have this name."""

    def serve(self, name: str, version: str, push: str) -> None:
        """Have new requests use the adapter that every rank has loaded."""


class EngineFrontEnd(Protocol):
    """What the process that serves HTTP must offer. Any error but a `WeightSyncError` counts as a failed commit."""

    engine: str
    engine_version: str
    model: str
    pause_refused: dict[str, str]
    """For each pause mode that the engine does not support, the reason."""
    waits: bool
    """Whether the engine was started to wait for its first push; it is paused until then."""
    off: dict[str, str]
    """What this engine does not support, or what a push does not update, by name, with the reason."""
    asleep: tuple[str, ...]
    """The engine's tags of memory that slept when a push or `diagnose` last asked the ranks."""
    lockstep: Lockstep | None
    """Its part, if it is in lockstep with other engines; then its `commit` agrees with theirs."""

    @property
    def lora(self) -> ServedLora | str:
        """Its LoRA adapters; or why none can be pushed into it."""

    @property
    def busy(self) -> str:
        """What runs in the engine that calls to its ranks wait for; empty if they need not wait."""

    async def version(self) -> str:
        """The label of the weights being served."""

    async def call(self, method: str, payload: bytes) -> Replies:
        """Run `rank_methods.handle` on every rank; returns the `rank_replies.RankReply` of each. Has no deadline."""

    async def commit(self, request: http.CommitRequest, call: Calls, stopped: bool) -> http.CommitReply:
        """Pause, apply, drop caches, set the version (that of an adapter, see `ServedLora.serve`), resume.

        Every rank is ready; ``stopped``: already paused. An adapter that its ranks may hold in different versions is
        not served afterwards, to no request.

        If it raises with ``weights`` unchanged it generates again unless it was ``stopped``, else it stays stopped.
        """

    async def withdraw(self, push: str) -> None:
        """Note that this engine does not serve ``push``: engines in lockstep with it need not wait. Never raises."""

    async def stay_stopped(self, why: str) -> None:
        """Keep a dirty engine paused until a full push commits; ``why`` answers anybody who tries to resume it."""


def lora_versions(front: EngineFrontEnd) -> dict[str, str]:
    """The versions of the pushed adapters that an engine serves, by name."""
    return {} if isinstance(front.lora, str) else front.lora.versions


def addressed(asked: http.UpdateRequest, front: EngineFrontEnd, stopped: str) -> http.UpdateRequest:
    """The request for the ranks: a pushed adapter gets its number. Raises `UnsupportedOption`, or `WrongState`.

    ``stopped``: why the engine does not generate. Only weights may end that.
    """
    if asked.adapter is UNSET:
        return asked
    name = asked.adapter.name
    if isinstance(front.lora, str):
        raise UnsupportedOption(f"lora={name!r}: this {front.engine} takes no adapter: {front.lora}")
    if stopped:
        raise WrongState(f"lora={name!r}: this {front.engine} does not generate ({stopped}); push the weights first")
    return structs.replace(asked, adapter=structs.replace(asked.adapter, number=front.lora.number(name)))

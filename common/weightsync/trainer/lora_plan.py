"""Works out a push of an adapter: as `push_plan`, but nothing is cast, shared or left out, and the stage is small."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from weightsync.deadline import Deadline
from weightsync.errors import ManifestMismatch
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.lora import LORA_MINOR
from weightsync.sources.lora import LoraSource
from weightsync.tensors.conversion import NO_CONVERSIONS
from weightsync.tensors.layout import listed
from weightsync.trainer.push_plan import Planner, PushPlan
from weightsync.trainer.transfer import Transfer


def of(source: LoraSource, planner: Planner, transfer: Transfer, deadline: Deadline) -> PushPlan:
    """Plan a push of ``source``, of which a trainer's ranks may each hold a part.

    Raises `ManifestMismatch` for an adapter of another model, by the engines' lists of their checkpoints,
    `UnsupportedOption` for an engine of an earlier release, `SourceError`, and what the ranks raise.
    """
    planner.check_protocol(LORA_MINOR, "takes no adapters")
    check(source, planner.expected(deadline))
    layout, choice, ranks = planner.apart(source, transfer, deadline)
    request = planner.request(transfer, source, layout, choice, ())
    # What the engine makes of the tensors is compared with nothing: "deep" is for weights.
    verify = "off" if request.verify == "off" else "digest"
    request = structs.replace(request, adapter=source.adapter, verify=verify, keep=False, parts=False)
    return PushPlan(source, request, layout, choice, None, None, NO_CONVERSIONS, ranks)


def check(source: LoraSource, engines: Mapping[str, ExpectedReply]) -> None:
    """Raise `ManifestMismatch`, by name, for layers whose weights have another shape in an engine's checkpoint.

    Whether there are such layers is the engine's to say: a checkpoint may hold them under other names.
    """
    for url, reply in engines.items():
        shapes = {spec.name: spec.shape for spec in reply.tensors}
        unfit = []
        for layer, own in source.weights.items():
            weight = shapes.get(f"{layer}.weight", ())
            if len(weight) == 2 and weight != own:
                unfit.append(f"{layer} is {list(weight)} there, and {list(own)} here")
        if unfit:
            raise ManifestMismatch(
                f"the adapter {source.adapter.name!r} belongs to another model than {url} serves: {listed(unfit)}"
            )

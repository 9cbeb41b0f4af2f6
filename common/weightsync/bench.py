"""`weightsync bench`: what pushes to running engines cost on this host, phase by phase, and what limits them.

It prepares and sends tensors that are made up, and has the engines drop them, so that they go on serving what they
serve. Only with ``commit`` they load something: their own checkpoint, under the label that they have.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.errors import SourceError, UnsupportedOption, WeightSyncError, WrongState, during
from weightsync.memory import arenas
from weightsync.protocol import auth
from weightsync.protocol.states import PUSH, Machine
from weightsync.sources import open_source
from weightsync.sources.checkpoint import local_folder
from weightsync.tensors.layout import DTYPES, Layout
from weightsync.trainer.asked import Asked
from weightsync.trainer.driver import Driver
from weightsync.trainer.push_plan import Options
from weightsync.trainer.reading import Reading
from weightsync.transports.control.sockets import host_of, interface_of, local_address, own_address

#: Pushes after the first, whose median is shown.
_MORE: Final = 3
#: What is measured beside them is at most this large, and scaled to the size of a push.
_SAMPLE_BYTES: Final = 1 << 28
_SAMPLES: Final = 3
#: A byte of the tensors that are made up, for which all floating-point types have a small finite number.
_FILL: Final = 0x3C
_BLOCK: Final = 1 << 22
#: What its pushes are called: an engine that serves one of them serves its own checkpoint.
_PREFIX: Final = "bench-"
#: Phases in the order of a push, and how they are shown; parts of a phase are indented.
_ROWS: Final = {
    "plan": "plan",
    "arena": "arena",
    "prepare": "prepare",
    "record": "  record",
    "transfer": "transfer",
    "gather": "  gather",
    "digest": "  digest",
    "verify": "  verify",
    "commit": "commit",
    "pause": "  pause",
    "total": "total",
}


class Link(msgspec.Struct, frozen=True):
    """The interface through which engines on other hosts are reached; ``bits_per_s`` is None if it does not say."""

    interface: str
    bits_per_s: float | None


class Report(msgspec.Struct, frozen=True):
    """What was measured.

    ``engines`` says, by URL, what each engine is and how the bytes get there. ``pushes`` has the seconds of each push
    by phase, as in `PushResult.seconds`, and with ``committed`` the longest ``pause``. ``memcpy_s``, ``disk_s`` and
    ``link_s`` are the seconds in which the bytes of one push are copied in this host's memory, read from the files of
    the checkpoint past the page cache, and sent over ``link``; None where there is none.
    """

    engines: dict[str, str]
    nbytes: int
    tensors: int
    committed: bool
    pushes: list[dict[str, float]]
    memcpy_s: float
    disk_s: float | None
    link: Link | None
    link_s: float | None

    def lines(self) -> Iterator[str]:
        """The report for people."""
        yield from (f"{url}: {said}" for url, said in self.engines.items())
        what = "pushed the engine's own checkpoint" if self.committed else "sent made-up tensors, and aborted"
        yield f"{what}: {self.nbytes} bytes in {self.tensors} tensors"
        usual = self.usual
        yield f"{'seconds':<12} {'first':>9} {'then':>9}"
        for phase in (phase for phase in _ROWS if phase in usual):
            yield f"{_ROWS[phase]:<12} {self.pushes[0][phase]:>9.4f} {usual[phase]:>9.4f}"
        yield f"memcpy of the same bytes takes {self.memcpy_s:.4f} s, {_share(self.memcpy_s, usual)}"
        if self.disk_s is not None:
            yield f"reading them from disk takes {self.disk_s:.4f} s, {_share(self.disk_s, usual)}"
        if self.link is not None:
            took = "which does not say how fast it is"
            if self.link_s is not None:
                took = f"takes at least {self.link_s:.4f} s, {_share(self.link_s, usual)}"
            yield f"sending them over {self.link.interface} {took}"
        yield f"most of it: {self.limit}"

    @property
    def usual(self) -> dict[str, float]:
        """The median of the pushes after the first, by phase."""
        rest = self.pushes[1:]
        return {phase: statistics.median(push[phase] for push in rest) for phase in self.pushes[0]}

    @property
    def limit(self) -> str:
        """What takes most of a push after the first."""
        took = self.usual
        moved = max(0.0, took["transfer"] - took["gather"] - took["digest"] - took["verify"])
        parts = {
            "comparing load plans with loaders, in prepare": took["record"],
            "asking the engines, in prepare": took["prepare"] - took["record"],
            "copying the tensors, in transfer": took["gather"],
            'hashing on the trainer, in transfer (verify="off" saves it)': took["digest"],
            'hashing at the slowest rank, in transfer (verify="off" saves it)': took["verify"],
            f"moving the bytes{' over the network' if self.link else ''}, in transfer": moved,
            "loading in the engines, in commit": took.get("commit", 0.0),
        }
        return max(parts, key=lambda part: parts[part])


def measure(
    urls: Sequence[str], *, commit: bool, transport: str = "auto", address: str = "", timeout_s: float = 300.0
) -> Report:
    """Measure pushes to the engines at ``urls``; the other arguments are those of a `Sender`, see there.

    Takes the leases of the engines. Raises `WeightSyncError`, and changes nothing, where an engine serves nothing,
    keeps a version to go back to, or does not say what a complete push is; with ``commit`` also where it serves what
    somebody pushed, or runs on another host. Raises it too, with ``weights="committed"``, if the checkpoint turns out
    to be another than the engine served.
    """
    where = own_address(address) if address else ""
    options = Options(timeout_s, transport, "retract", "full", "digest", False, None, False, where, "first")
    # The same weights are pushed again and again, of which nothing changes.
    options = options._replace(delta="never", prefix=_PREFIX)
    machine: Machine[str] = Machine(PUSH, "idle", "this bench")
    with during("bench"):
        driver = Driver(list(urls), auth.sender_token(), options, None, machine, Deadline(timeout_s))
        try:
            driver.connect(Deadline(timeout_s))
            return _measured(driver, commit, options)
        finally:
            driver.close(Deadline(timeout_s))


def _measured(driver: Driver, commit: bool, options: Options) -> Report:
    timeout_s = options.timeout_s
    _check_idle(driver, Deadline(timeout_s))
    folder, label = _own_checkpoint(driver, Deadline(timeout_s)) if commit else (None, "")
    source = open_source(_made_up(driver, Deadline(timeout_s)) if folder is None else folder)
    served = _digests(driver, Deadline(timeout_s)) if commit else {}
    pushes = []
    for _ in range(1 + _MORE):
        start, deadline = time.perf_counter(), Deadline(timeout_s)
        if folder is None:
            pushes.append(driver.rehearse(source, deadline))
            continue
        result = driver.push(source, Asked(label, label, ()), deadline, start, Reading())
        pause_s = max(engine.pause_s for engine in result.engines.values())
        pushes.append({**result.seconds, "pause": pause_s})
        if len(pushes) == 1:
            _check_same(served, _digests(driver, Deadline(timeout_s)), folder, label)
    nbytes = Layout(source.specs).payload_bytes
    link = _link(driver, options.address)
    speed = link.bits_per_s if link is not None else None
    return Report(
        engines={url: _described(driver, url) for url in driver.engines.by_url},
        nbytes=nbytes,
        tensors=len(source.specs),
        committed=commit,
        pushes=pushes,
        memcpy_s=_memcpy_s(nbytes),
        disk_s=None if folder is None else _disk_s(folder, nbytes),
        link=link,
        link_s=None if speed is None else 8 * nbytes / speed,
    )


def _share(seconds: float, usual: Mapping[str, float]) -> str:
    return f"{seconds / usual['transfer']:.0%} of transfer"


def _check_idle(driver: Driver, deadline: Deadline) -> None:
    for url, status in driver.status(deadline).items():
        if driver.engines.by_url[url].hello.stopped:
            raise WrongState(f"{url} serves nothing, and a push that it drops would not change that; push first")
        # What a standby holds stays: a push that is dropped loads nothing.
        if any(rank.previous not in ("", rank.standby) for rank in status.ranks):
            raise WrongState(f"{url} keeps a version to go back to (keep_previous), which it would drop")


def _digests(driver: Driver, deadline: Deadline) -> dict[str, list[str]]:
    """Digests of what every rank computes with, by the engine's URL."""
    found = driver.status(deadline, digest=True).items()
    return {url: [rank.digest for rank in status.ranks] for url, status in found}


def _check_same(before: Mapping[str, list[str]], now: Mapping[str, list[str]], folder: Path, label: str) -> None:
    """Raise `WeightSyncError` if the commit of ``folder`` has changed what an engine serves as version ``label``."""
    for url, digests in now.items():
        if digests != before[url]:
            raise WeightSyncError(
                f"{url} serves {folder} now, and served other weights before (dummy weights, another revision, or what "
                f"one of its own routes has loaded), also as version {label!r}; start it again",
                engines=dict.fromkeys(before, "committed"),
            )


def _made_up(driver: Driver, deadline: Deadline) -> dict[str, torch.Tensor]:
    """Tensors of the names, shapes and dtypes that the engines expect."""
    for url, reply in driver.engines.expected(deadline).items():
        if not reply.tensors:
            why = reply.why or "its weightsync is of an earlier release"
            raise UnsupportedOption(f"{url} does not say what a complete push is: {why}; measure your own pushes")
    specs = next(iter(driver.engines.expected(deadline).values())).tensors
    try:
        made = {spec.name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in specs}
        for tensor in made.values():
            tensor.reshape(-1).view(torch.uint8).fill_(_FILL)  # memory that was never written to is copied too fast
    except RuntimeError as error:
        raise UnsupportedOption(f"there is no memory for tensors of the size of the model: {error}") from error
    return made


def _own_checkpoint(driver: Driver, deadline: Deadline) -> tuple[Path, str]:
    """The folder that every engine was started with, and the label that they have. Raises `WeightSyncError`."""
    found = set()
    for url, status in driver.status(deadline).items():
        hello = driver.engines.by_url[url].hello
        if status.committed and not status.committed.startswith(_PREFIX):
            raise WrongState(
                f"{url} serves version {status.version!r}, which was pushed: --commit would replace it by the engine's "
                "own checkpoint"
            )
        if hello.host != arenas.host_id():
            raise UnsupportedOption(f"{url} runs on another host: --commit needs the engine's own checkpoint, there")
        found.add((hello.model, status.version))
    if len(found) > 1:
        raise UnsupportedOption(
            f"the engines serve different checkpoints: {sorted(found)}; measure one after the other"
        )
    ((model, label),) = found
    try:
        return local_folder(model), label
    except SourceError as error:
        raise UnsupportedOption(
            f"--commit pushes the engine's own checkpoint, but {error} on this host: hf download {model}"
        ) from error


def _described(driver: Driver, url: str) -> str:
    engine = driver.engines.by_url[url]
    hello = engine.hello
    ranks = f"{len(hello.ranks)} rank{'s' if len(hello.ranks) > 1 else ''}"
    return f"{hello.engine} {hello.engine_version}, {hello.model}, {ranks}, over {engine.transport} ({engine.reason})"


def _memcpy_s(nbytes: int) -> float:
    size = min(nbytes, _SAMPLE_BYTES)
    source, target = (torch.full((size,), _FILL, dtype=torch.uint8) for _ in range(2))
    took = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        target.copy_(source)
        took.append(time.perf_counter() - start)
    return statistics.median(took) * nbytes / size


def _disk_s(folder: Path, nbytes: int) -> float:
    """Seconds of reading so many bytes of the checkpoint from its disk."""
    done, start = 0, time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        if done >= _SAMPLE_BYTES:
            break
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while done < _SAMPLE_BYTES and (block := opened.read(_BLOCK)):
                done += len(block)
    return (time.perf_counter() - start) * nbytes / max(done, 1)


def _link(driver: Driver, given: str) -> Link | None:
    """The interface that has the address ``given``, or else that to the first engine on another host, if any is."""
    engines = driver.engines.by_url
    far = [url for url, engine in engines.items() if engine.hello.host != arenas.host_id()]
    if not far:
        return None
    try:
        interface = interface_of(given or local_address(host_of(far[0])))
    except WeightSyncError:
        return None
    speed = Path("/sys/class/net", interface.partition(" ")[0], "speed")
    with contextlib.suppress(OSError, ValueError):
        if (megabits := int(speed.read_text())) > 0:
            return Link(interface, megabits * 1e6)
    return Link(interface, None)

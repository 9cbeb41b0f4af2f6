"""``weightsync status URL ...``, ``abort URL ...`` and ``join TRAINER URL ...``, for operators of engines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.protocol import auth, http
from weightsync.trainer.client import EngineClient


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if the command succeeded for every engine, else 1."""
    parser = argparse.ArgumentParser(prog="weightsync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("status", "print what engines serve and what they are doing"),
        ("abort", "drop a push that is stuck, and end the lease of its trainer"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("urls", metavar="URL", nargs="+", help="base URL of an engine")
        command.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS")
    summary = "ask a listening trainer (Sender.listen) to bring engines to its current version"
    command = commands.add_parser("join", help=summary, description=summary)
    command.add_argument("trainer", metavar="TRAINER", help="base URL that the trainer listens at")
    command.add_argument("urls", metavar="URL", nargs="+", help="base URL of an engine, as the trainer reaches it")
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    failed = 0
    for url in options.urls:
        try:
            client = EngineClient(getattr(options, "trainer", url), auth.sender_token())
            print(_RUN[options.command](client, url, Deadline(options.timeout)))
        except WeightSyncError as error:
            failed += 1
            print(f"{url}: {error}", file=sys.stderr)
    return 1 if failed else 0


def _status(client: EngineClient, url: str, deadline: Deadline) -> str:
    status = client.status(deadline)
    ranks = [line for rank in status.ranks for line in _rank(rank)]
    held = f", lease of {status.holder}" if status.holder else ""
    why = f" ({status.detail})" if status.detail else ""
    off = [f"  {name}: off ({reason})" for name, reason in status.off.items()]
    lines = [f"{client.url}: {status.engine} {status.state}{why}, version {status.version}{held}", *off, *ranks]
    return "\n".join(map(_printable, lines))


def _rank(rank: http.RankStatus) -> Iterator[str]:
    yield f"  rank {rank.rank}: {rank.state}" + "".join(
        f", {word}" for word in (rank.push, rank.detail, rank.loading) if word
    )
    model = rank.model
    if isinstance(model, msgspec.UnsetType):
        return
    if model.parameters:
        yield (
            f"    {model.written} of {model.parameters} parameters are loaded"
            + _names("not", model.parameters - model.written, model.unwritten)
            + _names("tensors that it does not read:", model.unread_tensors, model.unread)
            + f"; pushes loaded by this plan: {model.pushes}"
        )
    for comparison in model.compared:
        result = f"no, {comparison.fault}" if comparison.fault else "yes"
        push = f" (push {comparison.push})" if comparison.push else ""
        yield f"    {comparison.what} matches the load plan: {result}{push}"


def _names(label: str, count: int, few: Sequence[str]) -> str:
    more = f" and {count - len(few)} more" if count > len(few) else ""
    return f"; {label} {', '.join(few)}{more}" if few else ""


def _abort(client: EngineClient, url: str, deadline: Deadline) -> str:
    client.abort("", deadline)
    return f"{client.url}: aborted; " + _status(client, url, deadline).split(": ", 1)[1]


def _join(trainer: EngineClient, url: str, deadline: Deadline) -> str:
    version = trainer.add_engine(url, deadline)
    return _printable(f"{url}: serves version {version}" if version else f"{url}: waits for the next push")


def _printable(line: str) -> str:
    """Replace control characters: trainers choose versions and holders, and these must not control the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)


_RUN = {"status": _status, "abort": _abort, "join": _join}

"""``weightsync status URL ...``, ``abort URL ...`` and ``join TRAINER URL ...``, for whoever looks after engines."""

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
    """Run the command line; returns 0 if every engine did as it was asked."""
    parser = argparse.ArgumentParser(prog="weightsync", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("status", "print what engines serve and what they are doing"),
        ("abort", "forget a push that is stuck, and end the lease of whoever began it"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("urls", metavar="URL", nargs="+", help="base URL of an engine")
        command.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS")
    what = "have a trainer that listens (Sender.listen) bring engines to the version that it serves"
    command = commands.add_parser("join", help=what, description=what)
    command.add_argument("trainer", metavar="TRAINER", help="where the trainer listens")
    command.add_argument("urls", metavar="URL", nargs="+", help="base URL of an engine, as the trainer reaches it")
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS")
    asked = parser.parse_args(arguments)
    failed = 0
    for url in asked.urls:
        try:
            client = EngineClient(getattr(asked, "trainer", url), auth.sender_token())
            print(_RUN[asked.command](client, url, Deadline(asked.timeout)))
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
    return "\n".join(map(_shown, lines))


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
            + f"; pushes by this plan: {model.pushes}"
        )
    for one in model.compared:
        found = f"no, {one.fault}" if one.fault else "yes"
        yield f"    as planned, {one.what}: {found}" + (f" (push {one.push})" if one.push else "")


def _names(what: str, count: int, few: Sequence[str]) -> str:
    more = f" and {count - len(few)} more" if count > len(few) else ""
    return f"; {what} {', '.join(few)}{more}" if few else ""


def _abort(client: EngineClient, url: str, deadline: Deadline) -> str:
    client.abort("", deadline)
    return f"{client.url}: aborted; " + _status(client, url, deadline).split(": ", 1)[1]


def _join(trainer: EngineClient, url: str, deadline: Deadline) -> str:
    version = trainer.add_engine(url, deadline)
    return _shown(f"{url}: serves version {version}" if version else f"{url}: waits for the next push")


def _shown(line: str) -> str:
    """Versions and holders are what trainers called them: nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


_RUN = {"status": _status, "abort": _abort, "join": _join}

"""``weightsync status|bench|abort URL ...``, ``doctor [URL ...]``, ``join TRAINER URL ...``, ``follow FOLDER URL ...``

For operators.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.protocol import auth, http
from weightsync.trainer.client import EngineClient

#: Seconds between two looks, and the least that a user may ask for.
_WATCH_S: Final = 2.0
_LEAST_WATCH_S: Final = 0.1
#: Clears a terminal and goes to its first line.
_CLEAR: Final = "\x1b[2J\x1b[H"

Said = tuple[str, dict[str, Any]]
"""What a command has found out: for people, and as JSON."""


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
        command.add_argument("--json", action="store_true", help="print a line of JSON for each engine")
        if name == "status":
            command.add_argument(
                "--watch",
                type=float,
                nargs="?",
                const=_WATCH_S,
                metavar="SECONDS",
                help=f"print it again every so many seconds, by default {_WATCH_S:g}, until interrupted",
            )
    summary = "ask a listening trainer (Sender.listen) to bring engines to its current version"
    command = commands.add_parser("join", help=summary, description=summary)
    command.add_argument("trainer", metavar="TRAINER", help="base URL that the trainer listens at")
    command.add_argument("urls", metavar="URL", nargs="+", help="base URL of an engine, as the trainer reaches it")
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS")
    command.add_argument("--json", action="store_true", help="print a line of JSON for each engine")
    summary = "look for what hinders pushes on this host, in engines and between them; 1 if anything is wrong"
    command = commands.add_parser("doctor", help=summary, description=summary)
    command.add_argument("urls", metavar="URL", nargs="*", help="base URL of an engine, as the trainer reaches it")
    command.add_argument("--address", default="", help="address of this host that engines dial, as in Sender")
    command.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for each engine")
    command.add_argument("--json", action="store_true", help="print a line of JSON for this host and each engine")
    summary = "measure pushes to engines, up to the commit, and say what limits them"
    command = commands.add_parser("bench", help=summary, description=summary)
    command.add_argument("urls", metavar="URL", nargs="+", help="base URL of an engine, as the trainer reaches it")
    command.add_argument("--commit", action="store_true", help="push the engines' own checkpoint, under their label")
    command.add_argument("--transport", default="auto", metavar="NAME", help="as in Sender")
    command.add_argument("--address", default="", help="address of this host that engines dial, as in Sender")
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for each push")
    command.add_argument("--json", action="store_true", help="print a line of JSON")
    summary = "push each version that a trainer writes into a folder or an object store (weightsync.files.Folder)"
    command = commands.add_parser("follow", help=summary, description=summary)
    command.add_argument("folder", metavar="FOLDER", help="a path, or a URL that fsspec knows, such as s3://BUCKET/RUN")
    command.add_argument("urls", metavar="URL", nargs="+", help="base URL of an engine, as this host reaches it")
    command.add_argument("--once", action="store_true", help="push the newest version and end; 1 if that failed")
    command.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between two looks")
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for each push")
    command.add_argument("--json", action="store_true", help="print a line of JSON for each event")
    options = parser.parse_args(arguments)
    if options.command in _WHOLE:
        return _WHOLE[options.command](options)
    if getattr(options, "watch", None) is None:
        return _once(options)
    try:
        for again in itertools.count():
            if again:
                time.sleep(max(options.watch, _LEAST_WATCH_S))
                print(_CLEAR if sys.stdout.isatty() else "", flush=True)
            _once(options)
    except KeyboardInterrupt:
        pass
    return 0


def _once(options: argparse.Namespace) -> int:
    failed = 0
    for url in options.urls:
        try:
            client = EngineClient(getattr(options, "trainer", url), auth.sender_token())
            text, reply = _RUN[options.command](client, url, Deadline(options.timeout))
        except WeightSyncError as error:
            failed += 1
            text, reply = f"{url}: {error}", {"error": type(error).__name__, "message": str(error)}
        if options.json:
            print(json.dumps({"url": url, **reply}), flush=True)
        else:
            print(text, file=sys.stderr if "error" in reply else sys.stdout, flush=True)
    return 1 if failed else 0


def _doctor(options: argparse.Namespace) -> int:
    from weightsync import doctor  # loads torch

    wrong = False
    for place in doctor.examine(options.urls, options.address, options.timeout):
        wrong |= place.wrong
        if options.json:
            found = {"url": place.url or None, "findings": msgspec.to_builtins(place.findings)}
            print(json.dumps(found), flush=True)
            continue
        for finding in place.findings:
            mend = f" -> {finding.mend}" if finding.mend else ""
            text = f"{finding.level:<5} {place.url or 'this host'}: {finding.check}: {finding.text}{mend}"
            print(_printable(text), flush=True)
    return 1 if wrong else 0


def _bench(options: argparse.Namespace) -> int:
    from weightsync import bench  # loads torch

    try:
        report = bench.measure(
            options.urls,
            commit=options.commit,
            transport=options.transport,
            address=options.address,
            timeout_s=options.timeout,
        )
    except WeightSyncError as error:
        if options.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        else:
            print(_printable(str(error)), file=sys.stderr, flush=True)
        return 1
    if options.json:
        print(json.dumps({**msgspec.to_builtins(report), "limit": report.limit}), flush=True)
    else:
        print("\n".join(map(_printable, report.lines())), flush=True)
    return 0


def _follow(options: argparse.Namespace) -> int:
    from weightsync.files.follow import follow  # loads torch

    def say(text: str, fields: dict[str, Any]) -> None:
        if options.json:
            print(json.dumps(fields), flush=True)
        else:
            print(_printable(text), file=sys.stderr if "error" in fields else sys.stdout, flush=True)

    try:
        pushed = follow(
            options.folder,
            options.urls,
            say,
            once=options.once,
            every_s=max(options.every, _LEAST_WATCH_S),
            timeout_s=options.timeout,
        )
    except WeightSyncError as error:
        say(str(error), {"event": "failed", "error": type(error).__name__, "message": str(error)})
        return 1
    except KeyboardInterrupt:
        return 0
    return 0 if pushed else 1


def _status(client: EngineClient, url: str, deadline: Deadline) -> Said:
    status = client.status(deadline)
    return _text(client, status), msgspec.to_builtins(status)


def _text(client: EngineClient, status: http.StatusReply) -> str:
    ranks = [line for rank in status.ranks for line in _rank(rank)]
    held = f", lease of {status.holder}" if status.holder else ""
    why = f" ({status.detail})" if status.detail else ""
    off = [f"  {name}: off ({reason})" for name, reason in status.off.items()]
    lora = "".join(f", adapter {name} version {version}" for name, version in (status.adapters or {}).items())
    lines = [f"{client.url}: {status.engine} {status.state}{why}, version {status.version}{lora}{held}", *off, *ranks]
    return "\n".join(map(_printable, lines))


def _rank(rank: http.RankStatus) -> Iterator[str]:
    versions = [repr(rank.previous)] if rank.previous else []
    versions += [f"adapter {name} {version!r}" for name, version in (rank.adapters or {}).items()]
    before = versions and f"can go back to {', '.join(versions)}"
    longest = rank.longest_call and f"stood still for {rank.longest_call} while its standby was loaded"
    stage = rank.stage_bytes and f"keeps {rank.stage_bytes / 1e9:.2f} GB of its own for what crosses"
    yield f"  rank {rank.rank}: {rank.state}" + "".join(
        f", {word}" for word in (rank.push, rank.detail, rank.loading, longest, before, stage) if word
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


def _abort(client: EngineClient, url: str, deadline: Deadline) -> Said:
    client.abort("", deadline)
    text, reply = _status(client, url, deadline)
    return f"{client.url}: aborted; " + text.split(": ", 1)[1], reply


def _join(trainer: EngineClient, url: str, deadline: Deadline) -> Said:
    version = trainer.add_engine(url, deadline)
    text = _printable(f"{url}: serves version {version}" if version else f"{url}: waits for the next push")
    return text, {"version": version}


def _printable(line: str) -> str:
    """Replace control characters: trainers choose versions and holders, and these must not control the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)


#: Commands about all URLs together.
_WHOLE = {"bench": _bench, "doctor": _doctor, "follow": _follow}
#: Commands about one URL after the other.
_RUN = {"status": _status, "abort": _abort, "join": _join}

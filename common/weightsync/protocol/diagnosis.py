"""What `weightsync doctor` finds, and the messages in which it asks engines. JSON over HTTP, as in `http`."""

from __future__ import annotations

from typing import Final, Literal

from weightsync.protocol.codec import Text
from weightsync.protocol.http import LOOK_S, Message, Timeout

#: The protocol's minor version from which engines answer `DiagnoseRequest`.
SINCE_MINOR: Final = 2

#: A ``note`` does not hinder pushes, or not now; what is ``wrong`` does.
Level = Literal["ok", "note", "wrong"]


class Finding(Message, frozen=True):
    """What one check has found: ``text`` describes it, and ``mend`` is the command or option that mends it.

    In ``mend``, ``URL`` stands for that of the engine. Findings of a transport's own check have its name as ``check``.
    """

    check: Text
    level: Level
    text: str
    mend: str = ""


class DiagnoseRequest(Message, frozen=True):
    """Ask what hinders pushes. ``timeout_s``: seconds to wait for the ranks.

    Every rank dials the sender's ``address``, unless that is empty, after the checks of a push; ``server_key`` is the
    sender's CURVE key if the address is TCP.
    """

    timeout_s: Timeout = LOOK_S
    address: Text = ""
    server_key: Text = ""


class RankReport(Message, frozen=True):
    """What one rank has found. ``listens`` is a TCP address (``HOST:PORT``) at which it accepts connections for some
    seconds, so that the trainer can dial it; empty if it was not asked to dial over TCP, or could not."""

    rank: int
    findings: tuple[Finding, ...] = ()
    listens: Text = ""


class DiagnoseReply(Message, frozen=True):
    """What an engine's front end has found, and its ranks; ``ranks`` is empty if they do not answer."""

    instance: Text
    findings: tuple[Finding, ...]
    ranks: tuple[RankReport, ...] = ()

"""What an engine does for its first push before it is there: says what a complete push is, and makes its standby."""

from __future__ import annotations

import logging
import secrets
from typing import Final

from weightsync.deadline import Deadline
from weightsync.engine.lease import Lease
from weightsync.engine.rank_calls import Calls, collect
from weightsync.errors import WeightSyncError
from weightsync.protocol import http
from weightsync.protocol.expected import MAKE_STANDBY, ExpectedReply, ExpectedRequest, StandbyRequest, one_list

logger = logging.getLogger(__name__)

#: Least timeout, in seconds, of a message.
_LEAST_S: Final = 0.01


async def expected(asked: ExpectedRequest, call: Calls, lease: Lease) -> ExpectedReply:
    """See `front_end.FrontEnd.expected`. No standby is made while another sender has the lease."""
    deadline = Deadline(asked.timeout_s)
    reply = one_list(collect(await call("weightsync_expected", b"{}", asked.timeout_s), ExpectedReply))
    if asked.standby is True and await lease.lapsed():
        await _make_standby(asked, call, deadline)
    return reply


async def _make_standby(asked: ExpectedRequest, call: Calls, deadline: Deadline) -> None:
    """Have the ranks make what the first push needs, in slices. What they do not make, that push makes."""
    request = StandbyRequest(secrets.token_hex(8), max(deadline.left(), _LEAST_S), asked.lent)
    try:
        collect(await call(MAKE_STANDBY, http.to_json(request), deadline.left()), http.Done)
    except WeightSyncError as error:
        logger.info("no standby was made before the first push: %s", error)

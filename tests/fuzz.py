"""Malformed messages, derived from the schema, so that a field that `protocol.http` gains is fuzzed as well.

`Schema.bodies` and `Schema.frames` are hypothesis strategies of bytes: random bytes, other shapes, the right shape with
faults, and well-typed messages that make no sense. `Traps` listens at addresses that an engine must not dial.
"""

import json
import struct
from base64 import b64encode
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import chain
from math import inf, nan
from typing import get_args

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from msgspec import inspect

from weightsync.engine import answers
from weightsync.protocol import control, handles, http
from weightsync.protocol.diagnosis import DiagnoseRequest
from weightsync.transports.nccl.messages import InitNcclGroup
from weightsync.transports.nixl.messages import NixlHandle, RegisterNixl
from weightsync.transports.rdt.messages import RdtHandle

#: Route -> the type of its message.
ROUTES = {name: route.kind() for name, route in answers.routes().items()}
#: Method of a rank -> the type of its message, as in `rank_methods.handle`.
METHODS = {
    "weightsync_open": http.Done,
    "weightsync_expected": http.Done,
    "weightsync_diagnose": DiagnoseRequest,
    "weightsync_status": http.StatusRequest,
    "update_weights_via_ipc_zmq": http.UpdateRequest,
    "update_weights_via_nccl": http.UpdateRequest,
    "update_weights_via_nixl": http.UpdateRequest,
    "update_weights_via_rdt": http.UpdateRequest,
    "init_nccl_group": InitNcclGroup,
    "register_nixl": RegisterNixl,
    "weightsync_ready": http.CommitRequest,
    "weightsync_commit": http.CommitRequest,
    "weightsync_restore": http.CommitRequest,
    "weightsync_abort": http.AbortRequest,
}
HANDLES = [handles.ShmHandle, handles.SharedParametersHandle, handles.CudaHandle, NixlHandle, RdtHandle]
FROM_RANK, FROM_SENDER = get_args(control.FromRank), get_args(control.FromSender)

#: Routes whose messages can take an engine's lease.
TAKES_LEASE = {name for name, kind in ROUTES.items() if "holder" in kind.__struct_fields__}

#: Seconds. A message with a shorter timeout is valid, and a busy machine rightly answers it with 504.
SHORTEST_TIMEOUT_S = 30.0
#: Bytes; an answer names the error and does not echo the message.
LONGEST_ANSWER = 20_000

TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\n\r\x1b[31m",
    "\u202e\ufeff",
    "\U0001f600" * 50,
    "x" * 2000,
    "..",
    "../../etc/passwd",
    "/",
    "~",
    "%s%n{0}${HOME}",
    "$(reboot)",
    "__class__",
    "WeightSyncError",
    "Exception",
    "-1",
    "null",
    "Bearer",
    "tcp://127.0.0.1:1",
    "tcp://*:*",
    "inproc://x",
    "udp://127.0.0.1:1",
    "ipc://",
    "ipc://*",
    "ipc:///",
    "ipc://@control",
    "ipc://weightsync-relative/control",
    "ipc:///tmp/weightsync-\0/control",
    "ipc:///tmp/weightsync-/../../control",
    "ipc:///etc/passwd",
    "ipc:///tmp/weightsync-" + "x" * 500 + "/control",
    "IPC:///tmp/weightsync-x/control",
    "ipc:///dev/shm/weightsync-none/control",
    "/dev/shm/weightsync-\0",
    "/dev/shm/weightsync-none",
    "/dev/shm/../etc/passwd",
    "127.0.0.1",
    "::1",
    "localhost",
    "0.0.0.0",
    "::",
    "255.255.255.255",
    "224.0.0.1",
    "fe80::1%lo",
    "127.0.0.1:1",
    "tcp://127.0.0.1:9",
    "tcp://[::1]:9",
    "tcp://0.0.0.0:9",
    "tcp://localhost:9",
    "tcp://127.0.0.1:0",
    "tcp://127.0.0.1:99999",
    "k" * 40,
    "float32",
    "bfloat16",
    "complex128",
    "xxh3_64",
    "model.norm.weight",
    "lm_head.weight",
]
#: The address and key of a sender on another host; drawn apart, the two would hardly ever meet.
FAR = {"address": "tcp://127.0.0.1:9", "server_key": "k" * 40}
INTEGERS = [-(1 << 63), -(1 << 31), -1, 0, 1 << 31, 1 << 50, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
FLOATS = [nan, inf, -inf, -0.0, -1.5, 1e308, 5e-324]
BLOBS = [
    b"",
    b"\0",
    b"{",
    b"[",
    b"null",
    b"[]",
    b'""',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"',
    b"{}{}",
    b"{" * 3000,
    b'{"a":' * 3000,
    b"\x80\x04\x95\x0c\0\0\0\0\0\0\0\x8c\x05posix\x94.",
    b"cposix\nsystem\n(S'true'\ntR.",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xffx",
    b"\xc1" * 9,
    b"\x91" * 3000,
    b"\xc6\xff\xff\xff\xff",
    b"PK\x03\x04",
]

#: For ``settings(FUZZ, max_examples=...)``: the same messages every time, none kept between runs.
FUZZ = settings(
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Spelled:
    """Bytes that no Python value is encoded as."""

    json: bytes
    msgpack: bytes


#: Nested arrays, numbers that no field can hold, nanoseconds, half of a surrogate pair.
ODDITIES = [
    *(Spelled(b"[" * depth + b"]" * depth, b"\x91" * depth + b"\xc0") for depth in (10, 100, 5000)),
    *(Spelled(b"1" + b"0" * digits, b"\xc7\x01\x07x") for digits in (30, 400, 5000)),
    Spelled(b"1e400", b"\xd6\xff\0\0\0\0"),
    Spelled(b'"\\ud800"', b"\xa3\xed\xa0\x80"),
]


class Pairs(list):
    """An object as a list of pairs, so that a key can occur twice."""


def as_json(value: object) -> bytes:
    """Encode as JSON; values that JSON cannot hold are written as a careless or hostile encoder would."""
    if isinstance(value, Spelled):
        return value.json
    if isinstance(value, Pairs | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return b"{" + b",".join(as_json(key) + b":" + as_json(item) for key, item in pairs) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(as_json, value)) + b"]"
    if isinstance(value, bytes):
        return b'"' + b64encode(value) + b'"'
    return json.dumps(value).encode()


def as_msgpack(value: object) -> bytes:
    """Encode as msgpack."""
    if isinstance(value, Spelled):
        return value.msgpack
    if isinstance(value, Pairs | dict):
        pairs = list(value.items() if isinstance(value, dict) else value)
        return b"\xdf" + struct.pack(">I", len(pairs)) + b"".join(map(as_msgpack, chain.from_iterable(pairs)))
    if isinstance(value, list | tuple):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(as_msgpack, value))
    if isinstance(value, str):
        raw = value.encode()
        return b"\xdb" + struct.pack(">I", len(raw)) + raw
    return msgspec.msgpack.encode(value)


class Schema:
    """Strategies for every message; ``texts`` are additional strings to try."""

    def __init__(self, texts=()):
        # A short random text could equal the label of a version.
        self.texts = st.sampled_from([*TEXTS, *texts]) | st.text(min_size=8, max_size=12)
        self._scalars = st.sampled_from([None, True, False, b"bytes", *INTEGERS, *FLOATS, *ODDITIES])
        self.anything = (
            self._scalars
            | self.texts
            | st.recursive(
                self._scalars | self.texts,
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(self.texts, inner, max_size=3),
                max_leaves=4,
            )
        )

    def bodies(self, kind):
        """HTTP bodies that are not a ``kind``, or a senseless one."""
        return self._encoded(inspect.type_info(kind), as_json)

    def frames(self, kinds):
        """ZMQ frames of one direction that are malformed or senseless."""
        return st.one_of([self._encoded(inspect.type_info(kind), as_msgpack) for kind in kinds])

    def senseless(self, kind):
        """A well-typed but senseless ``kind``, as a dict of its fields."""
        return self._struct(inspect.type_info(kind)).map(dict)

    def _encoded(self, info, encode):
        return st.one_of(
            st.sampled_from(BLOBS) | st.binary(max_size=40),
            self._broken(info, encode),
            self.anything.map(encode),
            self._faulty(info).map(encode),
            self._faulty(info).map(encode),
            self._struct(info).map(encode),
        )

    def handles(self):
        """Handles of memory, which each transport decodes by itself, and values that are not handles."""
        return st.one_of(st.none(), *(self._struct(inspect.type_info(kind)) for kind in HANDLES), self.anything)

    def _fine_value(self, info):
        """A value that the schema allows, sensible or not."""
        return _FINE[type(info)](self, info)

    def _string(self, info):
        longest = info.max_length or 4000
        return self.texts.map(lambda text: text.encode("utf-8", "replace").decode()[:longest])

    def _integer(self, info):
        low = info.ge if info.ge is not None else -(1 << 63)
        high = info.le if info.le is not None else (1 << 63) - 1
        step = info.multiple_of or 1
        among = [n for n in (*INTEGERS, low, high, 512, 1 << 20) if low <= n <= high and n % step == 0]
        return st.sampled_from(among)

    def _number(self, info):
        if info.le is None:
            return st.sampled_from(FLOATS)
        return st.sampled_from([max(info.ge, SHORTEST_TIMEOUT_S), 60.0, info.le])

    def _array(self, info):
        return st.lists(self._fine_value(info.item_type), max_size=min(3, info.max_length or 3))

    def _table(self, info):
        return st.dictionaries(self._fine_value(info.key_type), self._fine_value(info.value_type), max_size=3)

    def _struct(self, info):
        fields = [self._fine_value(field.type) for field in info.fields]
        if info.array_like:
            return st.tuples(*fields).map(list)
        names = [field.encode_name for field in info.fields]
        tag = [(info.tag_field, info.tag)] if info.tag_field else []
        made = st.tuples(*fields).map(lambda values: Pairs([*tag, *zip(names, values, strict=True)]))
        return made | made.map(_from_afar) if "server_key" in names else made

    @staticmethod
    def _faults():
        return st.lists(
            st.tuples(st.sampled_from(["odd", "odd", "odd", "drop", "twice", "rename", "more"]), st.integers(0, 30)),
            min_size=1,
            max_size=3,
        )

    def _faulty(self, info):
        """The right shape, with one to three faults."""
        return st.builds(_with_faults, self._struct(info), self._faults(), self.anything, self.texts)

    def _broken(self, info, encode):
        """The bytes of a message, with a byte removed or overwritten."""
        return st.builds(_scratched, self._struct(info).map(encode), st.integers(0, 1000), st.sampled_from(_SCRATCHES))


#: Without digits, which could turn a timeout into a shorter one.
_SCRATCHES = [b"", b"\0", b"\xff", b"{", b"}", b'"', b"\\", b",", b"\xc1", b"]]]]", b"\xdf\xff\xff\xff\xff"]


def _from_afar(pairs):
    return Pairs((name, FAR.get(name, value)) for name, value in pairs)


def _scratched(raw, at, scratch):
    at %= max(1, len(raw))
    return raw[:at] + (scratch + raw[at + 1 :] if scratch else b"")


def _with_faults(pairs, faults, odd, text):
    for fault, number in faults:
        at = number % max(1, len(pairs))
        if fault == "more" or not pairs:
            pairs.append((text, odd))
        elif fault == "odd":
            pairs[at] = (pairs[at][0], odd)
        elif fault == "drop":
            del pairs[at]
        elif fault == "twice":
            pairs.append((pairs[at][0], odd))
        else:
            pairs[at] = (text, pairs[at][1])
    return pairs


_FINE = {
    inspect.StrType: Schema._string,
    inspect.IntType: Schema._integer,
    inspect.FloatType: Schema._number,
    inspect.BoolType: lambda schema, info: st.booleans(),
    inspect.RawType: lambda schema, info: schema.handles(),
    inspect.NoneType: lambda schema, info: st.none(),
    inspect.BytesType: lambda schema, info: st.sampled_from([b"", b"\0" * 64, b"x" * 4096]),
    inspect.LiteralType: lambda schema, info: st.sampled_from(info.values),
    inspect.VarTupleType: Schema._array,
    inspect.DictType: Schema._table,
    inspect.TupleType: lambda schema, info: st.tuples(*map(schema._fine_value, info.item_types)),
    inspect.UnionType: lambda schema, info: st.one_of(*map(schema._fine_value, info.types)),
    inspect.StructType: Schema._struct,
}


class Line:
    """A persistent HTTP connection to an engine's admin routes that checks every answer."""

    def __init__(self, url, token):
        self._host, self._token = url.removeprefix("http://"), token
        self._connection = HTTPConnection(self._host, timeout=60)
        self.sent = 0

    def send(self, route, body):
        """Post a body; returns the status code and the answer."""
        head = {"Authorization": f"Bearer {self._token}"}
        try:
            self._connection.request("POST", f"{http.PREFIX}/{route}", body, head)
            reply = self._connection.getresponse()
        except (ConnectionError, HTTPException):  # the server may close an idle connection
            self._connection.close()
            self._connection.request("POST", f"{http.PREFIX}/{route}", body, head)
            reply = self._connection.getresponse()
        return reply.status, reply.read()

    def check(self, route, body):
        """Send a malformed body; the answer must be short and blame the message."""
        status, reply = self.send(route, body)
        self.sent += 1
        said = f"{route} {body[:300]!r} was answered with {status} {reply[:300]!r}"
        assert status == 200 or 400 <= status < 500, said
        assert len(reply) < LONGEST_ANSWER, said
        assert self._token.encode() not in reply, said
        if status != 200:
            http.from_json(reply, http.ErrorReply)
        else:
            http.from_json(body, ROUTES[route])  # only a valid message is answered with 200
        if route in TAKES_LEASE and status != 400:
            self.send("abort", b"{}")  # it was a valid message: its holder must not keep the lease

    def close(self):
        """Hang up."""
        self._connection.close()

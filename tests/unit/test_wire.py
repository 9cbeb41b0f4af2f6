"""Messages: what they look like on the wire is frozen."""

import msgspec
import pytest

from weightsync import wire
from weightsync.wire import TensorSpec

GOLDEN_JSON = {
    wire.OpenRequest(protocol=(1, 0), package_version="0.1.0"): b'{"protocol":[1,0],"package_version":"0.1.0"}',
    wire.UpdateRequest(
        push="p", address="ipc:///d/control", secret="s", bucket_bytes=512, timeout_s=1.5,
        manifest=(TensorSpec("w", "bfloat16", (2, 3)),),
    ): b'{"push":"p","address":"ipc:///d/control","secret":"s","bucket_bytes":512,"timeout_s":1.5,'
       b'"manifest":[["w","bfloat16",[2,3]]],"owner":"","holder":"","instance":"","verify":"off","digest":"",'
       b'"keep":false,"stream":false}',
    wire.CommitRequest(push="p", version="7", pause="retract", timeout_s=2.0):
        b'{"push":"p","version":"7","pause":"retract","timeout_s":2.0,"owner":"","rollback":false,"instance":""}',
    wire.LeaseRequest(owner="o"): b'{"owner":"o"}',
    wire.ErrorReply(error="ManifestMismatch", message="m"):
        b'{"error":"ManifestMismatch","message":"m","weights":"unchanged"}',
}  # fmt: skip

GOLDEN_MSGPACK = {
    wire.Hello(push="p", secret="s", rank=1):
        "85a474797065a568656c6c6fa470757368a170a6736563726574a173a472616e6b01a66d617070656490",
    wire.Offer(push="p", arena="a", handle=wire.ShmHandle(path="/d", nbytes=3)):
        "85a474797065a56f66666572a470757368a170a56172656e61a161a668616e646c65"
        "83a474797065a373686da470617468a22f64a66e627974657303a5616c69766590",
    wire.Filled(push="p", index=2, digests=(1,)):
        "84a474797065a666696c6c6564a470757368a170a5696e64657802a7646967657374739101",
    wire.Taken(push="p", index=2): "83a474797065a574616b656ea470757368a170a5696e64657802",
    wire.Prepared(push="p"):
        "83a474797065a87072657061726564a470757368a170a87665726966795f73cb0000000000000000",
    wire.Failed(push="p", error="E", message="m"):
        "84a474797065a66661696c6564a470757368a170a56572726f72a145a76d657373616765a16d",
}  # fmt: skip


@pytest.mark.parametrize("message", GOLDEN_JSON, ids=lambda m: type(m).__name__)
def test_json_is_frozen(message):
    assert wire.to_json(message) == GOLDEN_JSON[message]
    assert wire.from_json(GOLDEN_JSON[message], type(message)) == message


@pytest.mark.parametrize("message", GOLDEN_MSGPACK, ids=lambda m: type(m).__name__)
def test_msgpack_is_frozen(message):
    frame = bytes.fromhex(GOLDEN_MSGPACK[message])
    assert wire.pack(message) == frame
    unpack = wire.unpack_from_sender if isinstance(message, wire.Offer | wire.Filled) else wire.unpack_from_rank
    assert unpack(frame) == message


def test_fields_of_a_newer_minor_version_are_ignored():
    body = b'{"protocol":[1,9],"package_version":"9","invented":[1,2]}'
    assert wire.from_json(body, wire.OpenRequest).protocol == (1, 9)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"protocol":"1.0"}', b'{"protocol":[1]}', b"\xff", b"null"])
def test_what_is_no_message_is_refused(body):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        wire.from_json(body, wire.OpenRequest)


def test_a_pickle_is_no_message():
    with pytest.raises(msgspec.MsgspecError):
        wire.unpack_from_rank(b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.")

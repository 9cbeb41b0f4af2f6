"""The encoding of messages on the wire is frozen."""

import json
from typing import get_args

import msgspec
import pytest

from weightsync.protocol import control, handles, http, rank_replies
from weightsync.protocol.diagnosis import DiagnoseReply, DiagnoseRequest, Finding, RankReport
from weightsync.protocol.draft import DraftList
from weightsync.protocol.expected import ExpectedReply, ExpectedRequest
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.lockstep import Lockstep
from weightsync.protocol.lora import LoraSpec
from weightsync.protocol.model_status import Comparison, ModelStatus
from weightsync.transports.nccl.messages import InitNcclGroup
from weightsync.transports.nixl.messages import NixlHandle, RegisterNixl

FILE = handles.FileHandle(7, 3, 9)
GOLDEN_JSON = [
    (ExpectedRequest(timeout_s=1.5), b'{"timeout_s":1.5}'),
    (
        ExpectedReply((http.TensorSpec("w", "float32", (2, 3)),), ("o",), {"w": "bfloat16"}, "why"),
        b'{"tensors":[["w","float32",[2,3]]],"optional":["o"],"served":{"w":"bfloat16"},"why":"why"}',
    ),
    (
        ExpectedReply(quantization={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        b'{"tensors":[],"optional":[],"served":{},"why":"",'
        b'"quantization":{"quant_method":"fp8","weight_block_size":[128,128]}}',
    ),
    (
        ExpectedReply(draft=DraftList((http.TensorSpec("draft:w", "float32", (2,)),), ("draft:o",), "why")),
        b'{"tensors":[],"optional":[],"served":{},"why":"",'
        b'"draft":{"tensors":[["draft:w","float32",[2]]],"optional":["draft:o"],"why":"why"}}',
    ),
    (
        DiagnoseRequest(timeout_s=1.5, address="tcp://10.0.0.1:7", server_key="k"),
        b'{"timeout_s":1.5,"address":"tcp://10.0.0.1:7","server_key":"k"}',
    ),
    (
        DiagnoseReply("i", (Finding("key", "wrong", "why", "how"),), (RankReport(1, (), "10.0.0.2:7"),)),
        b'{"instance":"i","findings":[{"check":"key","level":"wrong","text":"why","mend":"how"}],'
        b'"ranks":[{"rank":1,"findings":[],"listens":"10.0.0.2:7"}]}',
    ),
    (
        http.OpenRequest(protocol=(1, 0), package_version="0.1.0", timeout_s=1.5),
        b'{"protocol":[1,0],"package_version":"0.1.0","timeout_s":1.5}',
    ),
    (
        http.AbortRequest(push="p", release="r", owner="o", timeout_s=1.5),
        b'{"push":"p","release":"r","owner":"o","timeout_s":1.5}',
    ),
    (http.StatusRequest(digest=True, timeout_s=1.5), b'{"digest":true,"timeout_s":1.5}'),
    (
        http.RankInfo(
            rank=1,
            pid=2,
            device="cuda",
            device_uuid="u",
            free_bytes=3,
            transports=("nccl",),
            settings={"NCCL": "2.27.5"},
            process_space="s",
            host="h",
            started=4,
        ),
        b'{"rank":1,"pid":2,"device":"cuda","device_uuid":"u","free_bytes":3,"transports":["nccl"],'
        b'"settings":{"NCCL":"2.27.5"},"process_space":"s","host":"h","started":4}',
    ),
    (
        http.OpenReply(
            protocol=(1, 0),
            engine="vllm",
            engine_version="0.32",
            package_version="0.1.0",
            host="b:1",
            model="m",
            version="7",
            ranks=(),
            pause_refused={"keep": "why"},
            instance="i",
            user="0 5",
            network="b:net:[1]",
            stopped=True,
            lockstep=Lockstep("10.0.0.1:29550", 2, 1, 4),
        ),
        b'{"protocol":[1,0],"engine":"vllm","engine_version":"0.32","package_version":"0.1.0","host":"b:1","model":"m",'
        b'"version":"7","ranks":[],"pause_refused":{"keep":"why"},"instance":"i","user":"0 5","network":"b:net:[1]",'
        b'"stopped":true,"lockstep":{"name":"10.0.0.1:29550","first":2,"count":1,"replicas":4}}',
    ),
    (
        http.UpdateRequest(
            push="p",
            address="ipc:///d/control",
            secret="s",
            bucket_bytes=512,
            timeout_s=1.5,
            manifest=(TensorSpec("w", "bfloat16", (2, 3)),),
        ),
        b'{"push":"p","address":"ipc:///d/control","secret":"s","bucket_bytes":512,"timeout_s":1.5,'
        b'"manifest":[["w","bfloat16",[2,3]]],"owner":"","holder":"","instance":"","verify":"off","digest":"",'
        b'"keep":false,"stream":false,"server_key":"","slots":2,"known":"","parts":false,"kept":[],'
        b'"any_order":false,"domains":[]}',
    ),
    (
        http.UpdateRequest(
            push="p",
            address="a",
            secret="s",
            bucket_bytes=512,
            timeout_s=1.5,
            manifest=(),
            adapter=LoraSpec("policy", 8, 16.0, True, {"q_proj": 4}, {"k_proj": 2.0}, 3),
        ),
        b'{"push":"p","address":"a","secret":"s","bucket_bytes":512,"timeout_s":1.5,'
        b'"manifest":[],"owner":"","holder":"","instance":"","verify":"off","digest":"",'
        b'"keep":false,"stream":false,"server_key":"","slots":2,"known":"","parts":false,"kept":[],'
        b'"any_order":false,"domains":[],"adapter":{"name":"policy","rank":8,"alpha":16.0,"rslora":true,'
        b'"ranks":{"q_proj":4},"alphas":{"k_proj":2.0},"number":3}}',
    ),
    (
        http.CommitRequest(push="p", version="7", pause="wait", timeout_s=2.0, lora="policy"),
        b'{"push":"p","version":"7","pause":"wait","timeout_s":2.0,"owner":"","rollback":false,"instance":"",'
        b'"lora":"policy"}',
    ),
    (
        http.StatusReply(engine="e", version="7", state="serving", ranks=(), adapters={"policy": "3"}),
        b'{"engine":"e","version":"7","state":"serving","ranks":[],"instance":"","committed":"","holder":"","detail":"",'
        b'"off":{},"adapters":{"policy":"3"}}',
    ),
    (
        http.UpdateReply(version="7", instance="i", record_s=1.5, kept=({"w": "d"},)),
        b'{"version":"7","instance":"i","stopped":false,"record_s":1.5,"kept":[{"w":"d"}]}',
    ),
    (http.UpdateReply(version="7", instance="i"), b'{"version":"7","instance":"i","stopped":false}'),
    (
        InitNcclGroup(
            group_name="g",
            master_address="10.0.0.1",
            master_port=29500,
            rank_offset=1,
            world_size=3,
            backend="gloo",
            timeout_s=1.5,
            members=(("http://a", 2),),
        ),
        b'{"group_name":"g","master_address":"10.0.0.1","master_port":29500,"rank_offset":1,"world_size":3,'
        b'"backend":"gloo","timeout_s":1.5,"address":"","owner":"","holder":"","instance":"",'
        b'"members":[["http://a",2]],"senders":1}',
    ),
    (
        RegisterNixl(agent="n", metadata=b"\0\xff", timeout_s=1.5),
        b'{"agent":"n","metadata":"AP8=","timeout_s":1.5,"address":"","owner":"","holder":"","instance":"",'
        b'"host":"","rdma":false,"others":[],"several":false}',
    ),
    (http.AddEngine(url="http://a"), b'{"url":"http://a"}'),
    (http.EngineAdded(version="7"), b'{"version":"7"}'),
    (
        http.JoinReply((http.RankJoined(rank=1, device="cpu", interface="lo", agent="n", metadata=b"\0\xff"),), "i"),
        b'{"ranks":[{"rank":1,"device":"cpu","interface":"lo","agent":"n","metadata":"AP8=",'
        b'"written":false}],"instance":"i"}',
    ),
    (
        http.CommitRequest(push="p", version="7", pause="retract", timeout_s=2.0),
        b'{"push":"p","version":"7","pause":"retract","timeout_s":2.0,"owner":"","rollback":false,"instance":""}',
    ),
    (http.LeaseRequest(owner="o"), b'{"owner":"o"}'),
    (rank_replies.Accepted(unread=("w",)), b'{"unread":["w"]}'),
    (
        rank_replies.Accepted(skipped=b"\5", unwritten={"p": b"\1"}, record_s=0.5),
        b'{"skipped":"BQ==","unwritten":{"p":"AQ=="},"record_s":0.5}',
    ),
    (rank_replies.Ready(), b"{}"),
    (rank_replies.Ready(record_s=0.5), b'{"record_s":0.5}'),
    (
        http.UpdateReply(version="7", instance="i", record_s=0.5),
        b'{"version":"7","instance":"i","stopped":false,"record_s":0.5}',
    ),
    (
        http.RankStatus(
            rank=1,
            state="serving",
            model=ModelStatus(3, 2, ("p",), 1, ("w",), 4, (Comparison("what the loader does", "v", "f"),)),
        ),
        b'{"rank":1,"state":"serving","push":"","detail":"","digest":"","previous":"","failed":"","loading":"",'
        b'"model":{"parameters":3,"written":2,"unwritten":["p"],"unread_tensors":1,"unread":["w"],"pushes":4,'
        b'"compared":[{"what":"what the loader does","push":"v","fault":"f"}]}}',
    ),
    (
        http.RankStatus(rank=1, state="serving", previous="6", standby="6"),
        b'{"rank":1,"state":"serving","push":"","detail":"","digest":"","previous":"6","failed":"","loading":"",'
        b'"standby":"6"}',
    ),
    (
        http.RankStatus(rank=1, state="serving", adapters={"policy": "6"}),
        b'{"rank":1,"state":"serving","push":"","detail":"","digest":"","previous":"","failed":"","loading":"",'
        b'"adapters":{"policy":"6"}}',
    ),
    (
        http.RankStatus(rank=1, state="serving", loading="load plan, 3 copies"),
        b'{"rank":1,"state":"serving","push":"","detail":"","digest":"","previous":"","failed":"",'
        b'"loading":"load plan, 3 copies"}',
    ),
    (
        http.StatusReply(engine="e", version="7", state="serving", ranks=(), off={"draft model": "why"}),
        b'{"engine":"e","version":"7","state":"serving","ranks":[],"instance":"","committed":"","holder":"","detail":"",'
        b'"off":{"draft model":"why"}}',
    ),
    (
        http.ErrorReply(error="ManifestMismatch", message="m"),
        b'{"error":"ManifestMismatch","message":"m","weights":"unchanged"}',
    ),
]

#: Messages from before fields were added: what older peers sent, and all that they understand.
EARLIER_JSON = [
    (http.OpenRequest(protocol=(1, 0), package_version="0.1.0"), b'{"protocol":[1,0],"package_version":"0.1.0"}'),
    (
        http.RankInfo(
            rank=1,
            pid=2,
            device="cuda",
            device_uuid="u",
            free_bytes=3,
            transports=("nccl",),
            settings={"NCCL": "2.27.5"},
        ),
        b'{"rank":1,"pid":2,"device":"cuda","device_uuid":"u","free_bytes":3,"transports":["nccl"],'
        b'"settings":{"NCCL":"2.27.5"},"process_space":""}',
    ),
    (http.AbortRequest(push="p", release="r", owner="o"), b'{"push":"p","release":"r","owner":"o"}'),
    (http.StatusRequest(digest=True), b'{"digest":true}'),
]

FAR = NixlHandle(agent="n", metadata=b"\0\xff", address=1 << 40, nbytes=3, device_id=0, memory="DRAM")
GOLDEN_MSGPACK = [
    (
        control.Register(push="p", secret="s", rank=1, keeps="k", parts=((0, ((1, 2), (3, 4))),)),
        "87a474797065a568656c6c6fa470757368a170a6736563726574a173a472616e6b01a66d617070656490"
        "a56b65657073a16ba5706172747391920092920102920304",
    ),
    (control.DescribeSubset(push="p"), "82a474797065a76578706c61696ea470757368a170"),
    (
        control.Offer(push="p", arena="a", handle=control.raw_handle(handles.ShmHandle(path="/d", nbytes=3))),
        "86a474797065a56f66666572a470757368a170a56172656e61a161a668616e646c6583a474797065a373686da470617468a2"
        "2f64a66e627974657303a5616c69766590a66f746865727390",
    ),
    (
        control.Offer(push="p", arena="a", handle=control.raw_handle(FAR), alive=("a",)),
        "86a474797065a56f66666572a470757368a170a56172656e61a161a668616e646c6587a474797065a46e69786ca56167656e"
        "74a16ea86d65746164617461c40200ffa761646472657373cf0000010000000000a66e627974657303a96465766963655f69"
        "6400a66d656d6f7279a44452414da5616c69766591a161a66f746865727390",
    ),
    (
        control.BucketReady(push="p", index=2, digests=(1,), sender=3, begins=(4,)),
        "87a474797065a666696c6c6564a470757368a170a5696e64657802a7646967657374739101a46c616e6503a6626567696e73"
        "9104a6646967657374c0",
    ),
    (
        control.Supplied(push="p", agent="n", name="a"),
        "84a474797065a8737570706c696564a470757368a170a56167656e74a16ea46e616d65a161",
    ),
    (
        control.PassOn("p", "http://a", 1, control.raw_handle(FAR), 2),
        "86a474797065a7706173735f6f6ea470757368a170a6656e67696e65a8687474703a2f2f61a472616e6b01a668616e646c65"
        "87a474797065a46e69786ca56167656e74a16ea86d65746164617461c40200ffa761646472657373cf0000010000000000a6"
        "6e627974657303a96465766963655f696400a66d656d6f7279a44452414da5666972737402",
    ),
    (control.Heartbeat(push="p"), "82a474797065a57374696c6ca470757368a170"),
    (control.BucketDone(push="p", index=2), "83a474797065a574616b656ea470757368a170a5696e64657802"),
    (
        control.WriteWindow("p", 4, 2, control.raw_handle(FAR)),
        "86a474797065a4726f6f6da470757368a170a5736c6f747304a47570746f02a668616e646c6587a474797065a46e69786ca5"
        "6167656e74a16ea86d65746164617461c40200ffa761646472657373cf0000010000000000a66e627974657303a964657669"
        "63655f696400a66d656d6f7279a44452414da7646f6d61696e739100",
    ),
    (
        control.WriteWindow("p", 2, 3),
        "86a474797065a4726f6f6da470757368a170a5736c6f747302a47570746f03a668616e646c65c0a7646f6d61696e739100",
    ),
    (
        control.Offer("p", "a", control.raw_handle(handles.SharedParametersHandle((FILE,), ((0, 0, 4096),), FILE))),
        "86a474797065a56f66666572a470757368a170a56172656e61a161a668616e646c6584a474797065a8696e5f706c616365a8"
        "73746f72616765739184a474797065a466696c65a370696407aa64657363726970746f7203a5696e6f646509a57061727473"
        "91930000cd1000a77265766f6b656484a474797065a466696c65a370696407aa64657363726970746f7203a5696e6f646509"
        "a5616c69766590a66f746865727390",
    ),
    (
        control.Prepared(push="p"),
        "83a474797065a87072657061726564a470757368a170a87665726966795f73cb0000000000000000",
    ),
    (
        control.Failed(push="p", error="E", message="m"),
        "84a474797065a66661696c6564a470757368a170a56572726f72a145a76d657373616765a16d",
    ),
]
FROM_SENDER = get_args(control.FromSender)

#: As `EARLIER_JSON`.
EARLIER_MSGPACK = [
    (
        control.Offer(push="p", arena="a", handle=control.raw_handle(FAR), alive=("a",)),
        "85a474797065a56f66666572a470757368a170a56172656e61a161a668616e646c6587a474797065a46e69786ca56167656e"
        "74a16ea86d65746164617461c40200ffa761646472657373cf0000010000000000a66e627974657303a96465766963655f69"
        "6400a66d656d6f7279a44452414da5616c69766591a161",
    ),
    (
        control.BucketReady(push="p", index=2, digests=(1,), sender=3, begins=(4,)),
        "86a474797065a666696c6c6564a470757368a170a5696e64657802a7646967657374739101a46c616e6503a6626567696e739104",
    ),
    (
        control.WriteWindow("p", 2, 3),
        "85a474797065a4726f6f6da470757368a170a5736c6f747302a47570746f03a668616e646c65c0",
    ),
]


def named(golden):
    return {
        "argnames": ("message", "raw"),
        "argvalues": golden,
        "ids": [type(message).__name__ for message, _ in golden],
    }


@pytest.mark.parametrize(**named(GOLDEN_JSON))
def test_json_is_frozen(message, raw):
    assert http.to_json(message) == raw
    assert http.from_json(raw, type(message)) == message


@pytest.mark.parametrize(**named(EARLIER_JSON))
def test_messages_from_before_a_field_was_added_are_understood(message, raw):
    assert http.from_json(raw, type(message)) == message
    # An older peer ignores the fields that it does not know.
    assert json.loads(raw).items() <= json.loads(http.to_json(message)).items()


@pytest.mark.parametrize(**named(EARLIER_MSGPACK))
def test_frames_from_before_a_field_was_added_are_understood(message, raw):
    unpack = control.unpack_from_sender if isinstance(message, FROM_SENDER) else control.unpack_from_rank
    assert unpack(bytes.fromhex(raw)) == message


@pytest.mark.parametrize(**named(GOLDEN_MSGPACK))
def test_msgpack_is_frozen(message, raw):
    frame = bytes.fromhex(raw)
    assert control.pack(message) == frame
    unpack = control.unpack_from_sender if isinstance(message, FROM_SENDER) else control.unpack_from_rank
    assert unpack(frame) == message


def test_every_type_of_frame_has_a_golden_message():
    assert {type(message) for message, _ in GOLDEN_MSGPACK} == {
        *get_args(control.FromRank),
        *get_args(control.FromSender),
    }


def test_fields_of_a_newer_minor_version_are_ignored():
    body = b'{"protocol":[1,9],"package_version":"9","invented":[1,2]}'
    assert http.from_json(body, http.OpenRequest).protocol == (1, 9)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"protocol":"1.0"}', b'{"protocol":[1]}', b"\xff", b"null"])
def test_invalid_messages_are_refused(body):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        http.from_json(body, http.OpenRequest)


def test_messages_from_before_there_were_other_transports_are_understood():
    body = b'{"push":"p","address":"ipc:///d/control","secret":"s","bucket_bytes":512,"timeout_s":1.5,"manifest":[]}'
    assert (http.from_json(body, http.UpdateRequest).slots, http.from_json(body, http.UpdateRequest).server_key) == (
        2,
        "",
    )
    assert http.from_json(b'{"rank":0,"pid":1,"device":"cpu"}', http.RankInfo).transports == ("ipc_zmq",)


def test_a_reply_from_before_user_and_network_were_added_is_understood():
    old = http.from_json(
        b'{"protocol":[1,0],"engine":"vllm","engine_version":"0.32","package_version":"0.1.0","host":"b:1","model":"m",'
        b'"version":"7","ranks":[],"pause_refused":{},"instance":"i"}',
        http.OpenReply,
    )
    assert (old.user, old.network, old.stopped) == ("", "", False)


def test_a_pickle_is_refused():
    with pytest.raises(msgspec.MsgspecError):
        control.unpack_from_rank(b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.")

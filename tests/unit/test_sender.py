"""The sender with reference engines: real servers around transformers models, in their own processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file

from tests.helpers import plan_of, served_digest
from tests.unit.manual import Trainer
from tools import models, servers
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.errors import (
    ApplyFailed,
    AuthenticationFailed,
    EngineUnreachable,
    ManifestMismatch,
    PluginNotLoaded,
    ProtocolMismatch,
    PushTimeout,
    SourceError,
    UnsupportedOption,
)
from weightsync.memory import arenas
from weightsync.protocol import auth, directories, http
from weightsync.sources import open_source
from weightsync.tensors.layout import Layout, digest_of
from weightsync.testing import ReferenceEngine
from weightsync.trainer.client import EngineClient

PROMPT = list(b"reference")


@pytest.fixture
def trained(model_folder):
    return models.load_reference(model_folder("llama", 1))


def post(engine, route, body, token=None):
    headers = {"Authorization": f"Bearer {auth.engine_token() if token is None else token}"}
    return requests.post(f"{engine.url}/weightsync/{route}", data=body, headers=headers, timeout=30)


def test_a_push_is_served(engine, trained):
    with Sender([engine.url]) as sender:
        result = sender.push(trained, version="trained")
    assert served_digest(engine) == digest_of(trained.state_dict().items())
    tokens, logprobs = engine.generate(PROMPT, 8)
    own = models.reference_logprobs(trained, PROMPT + tokens, len(PROMPT))
    assert sum(abs(x - y) for x, y in zip(logprobs, own, strict=True)) / 8 < 0.1  # bf16 rounds by batch shape
    assert (result.version, result.engines[engine.url].transport) == ("trained", "ipc_zmq")
    assert "the same host" in result.engines[engine.url].transport_reason
    assert result.nbytes == sum(p.numel() * p.element_size() for p in trained.parameters())
    parts = {"plan", "arena", "prepare", "record", "transfer", "gather", "digest", "verify", "commit", "total"}
    assert set(result.seconds) == parts


def test_versions_are_numbered_automatically(engine, trained):
    with Sender([engine.url]) as sender:
        sender.push(trained, version="41")
        assert [sender.push(trained).version for _ in range(2)] == ["42", "43"]
        assert sender.status()[engine.url].version == "43"


def test_two_engines_get_the_same_push(engine, model_folder, trained):
    with ReferenceEngine(model_folder("llama", 2)) as other:
        with Sender([engine.url, other.url]) as sender:
            result = sender.push(trained)
        assert set(result.engines) == {engine.url, other.url}
        assert served_digest(engine) == served_digest(other) == digest_of(trained.state_dict().items())


def test_a_checkpoint_folder_and_a_mapping_are_sources_too(engine, model_folder):
    folder = model_folder("llama", 1)
    with Sender([engine.url], progress=True, bucket_bytes=100_000) as sender:
        sender.push(models.load_reference(model_folder("llama", 0)))
        sender.push(folder)
        first = served_digest(engine)
        sender.push(models.load_reference(model_folder("llama", 0)))
        sender.push(str(folder))
        assert served_digest(engine) == first
        sender.push(models.load_reference(model_folder("llama", 0)))
        sender.push(load_file(folder / "model.safetensors"))
        assert served_digest(engine) == first


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda w: w.update(extra=torch.ones(2)), "unknown to the engine: extra"),
        (lambda w: w.update({"model.norm.weight": w["model.norm.weight"][:-1]}), "wrong shape: model.norm.weight"),
        (
            lambda w: w.update({"model.norm.weight": w["model.norm.weight"].to(torch.float8_e4m3fn)}),
            r"wrong dtype.*model.norm.weight \(float8_e4m3fn, the engine has bfloat16\)",
        ),
    ],
)
def test_a_push_that_does_not_fit_is_refused_by_name_before_any_weight_changes(engine, trained, change, said):
    before = served_digest(engine)
    weights = dict(trained.state_dict())
    change(weights)
    with Sender([engine.url]) as sender:
        with pytest.raises(ManifestMismatch, match=said) as raised:
            sender.push(weights)
        assert raised.value.engines == {engine.url: "unchanged"}
        assert served_digest(engine) == before
        sender.push(trained)
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_a_push_that_one_engine_refuses_reaches_none(engine, model_folder, trained):
    with ReferenceEngine(model_folder("qwen3", 0)) as other:
        before = served_digest(engine)
        with Sender([engine.url, other.url]) as sender:
            with pytest.raises(ManifestMismatch, match=other.url) as raised:
                sender.push(trained)
            assert raised.value.engines == {engine.url: "unchanged", other.url: "unchanged"}
            assert {status.state for status in sender.status().values()} == {"serving"}
        assert served_digest(engine) == before


@pytest.mark.parametrize(("what", "said"), [(42, "push a torch.nn.Module, a mapping"), ({}, "holds no tensors")])
def test_an_invalid_source_is_refused_with_the_valid_kinds(engine, what, said):
    with Sender([engine.url]) as sender, pytest.raises(SourceError, match=said):
        sender.push(what)


def test_an_absent_engine_is_reported():
    url = f"http://127.0.0.1:{servers.free_port()}"
    with pytest.raises(EngineUnreachable, match=f"no engine answers at {url}.*is it up"):
        Sender([url])


def wait_until_it_answers(url, process):
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            requests.get(url, timeout=1)
            return
        except requests.ConnectionError:
            time.sleep(0.05)
    raise AssertionError(f"nothing answers at {url}")


def test_a_server_without_the_plugin_is_reported():
    port = servers.free_port()
    code = f"import uvicorn; from starlette.applications import Starlette; uvicorn.run(Starlette(), port={port})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_until_it_answers(f"http://127.0.0.1:{port}", server)
            with pytest.raises(PluginNotLoaded, match=f"http://127.0.0.1:{port} answers.*vllm serve.*sglang.launch"):
                Sender([f"http://127.0.0.1:{port}"])
        finally:
            server.kill()
            server.communicate()


def test_a_wrong_key_and_no_key(engine):
    with pytest.raises(AuthenticationFailed, match=r"refused the key.*WEIGHTSYNC_TOKEN"):
        Sender([engine.url], token="wrong")
    for token in ("", "wrong", auth.engine_token()[:-1]):
        for route in ("status", "open", "update_weights_via_ipc_zmq", "commit", "abort"):
            reply = post(engine, route, b"{}", token)
            assert reply.status_code == 401
            assert reply.json()["message"] == "unauthorized"
    assert requests.post(f"{engine.url}/weightsync/status", timeout=10).status_code == 401


def test_malformed_messages_are_4xx_and_harmless(engine, trained):
    for route in ("status", "open", "update_weights_via_ipc_zmq", "commit", "abort"):
        for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"push":[],"digest":1}', b"\x80\x04\x95."):
            reply = post(engine, route, body)
            assert 400 <= reply.status_code < 500, (route, body, reply.status_code)
    with Sender([engine.url]) as sender:
        sender.push(trained)
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_a_body_that_is_too_large_is_refused(engine):
    def body():
        for _ in range(66):
            yield b" " * (1 << 20)

    assert post(engine, "open", body()).status_code == 413


def test_an_address_that_is_not_a_senders_is_not_dialled(engine):
    request = http.UpdateRequest(
        push="p", address="tcp://127.0.0.1:1", secret="s", bucket_bytes=512, timeout_s=1.0, manifest=()
    )
    with Sender([engine.url]) as sender:
        reply = post(engine, "update_weights_via_ipc_zmq", http.to_json(request))
        assert reply.status_code == 409
        assert "refused to dial 'tcp://127.0.0.1:1'" in reply.json()["message"]
        assert sender.status()[engine.url].state == "serving"


def test_a_commit_that_was_never_prepared_changes_nothing(engine):
    before = served_digest(engine)
    request = http.CommitRequest(push="never", version="9", pause="retract", timeout_s=5.0)
    reply = post(engine, "commit", http.to_json(request))
    assert reply.status_code == 409
    assert "has not prepared push never" in reply.json()["message"]
    assert served_digest(engine) == before


def test_a_protocol_mismatch_names_both_versions(model_folder):
    code = "from weightsync import testing; testing.http.PROTOCOL = (7, 1); testing.main()"
    newer = ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", code))
    ours = r"\.".join(map(str, http.PROTOCOL))
    with newer, pytest.raises(ProtocolMismatch, match=rf"sender speaks protocol {ours}, this engine 7\.1"):
        Sender([newer.url])


def test_an_engine_that_shares_no_memory_is_refused_with_advice(model_folder):
    can = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True, check=False
    )
    if can.returncode:
        pytest.skip(f"needs a mount namespace of its own: {can.stderr.decode().strip()}; run the tests as root")
    script = 'mount -t tmpfs none /dev/shm && exec "$0" -m weightsync.testing "$@"'
    with (
        ReferenceEngine(
            model_folder("llama", 0), launcher=("unshare", "-m", "sh", "-c", script, sys.executable)
        ) as far,
        pytest.raises(UnsupportedOption, match=f"{far.url} runs on another host.*--ipc=host"),
    ):
        Sender([far.url], transport="ipc_zmq")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engines": []}, "one or more"),
        ({"engines": "http://x"}, "list"),
        ({"engines": ["http://x", "http://x"]}, "different"),
        ({"transport": "carrier pigeon"}, "use one of auto, ipc_zmq, nccl, nixl"),
        ({"pause": "never"}, "use one of retract, wait, abort, keep"),
        ({"bucket_bytes": 1}, "at least 512"),
    ],
)
def test_invalid_options_are_refused(engine, options, said):
    with pytest.raises(UnsupportedOption, match=said):
        Sender(**{"engines": [engine.url], **options})


def test_an_engine_that_dies_before_the_push_is_named(model_folder, trained):
    with ReferenceEngine(model_folder("llama", 0)) as engine, Sender([engine.url]) as sender:
        engine.close()
        with pytest.raises(EngineUnreachable, match=engine.url) as raised:
            sender.push(trained)
        assert raised.value.engines == {engine.url: "unknown"}


def test_a_frozen_engine_ends_the_push_by_its_deadline(model_folder, trained):
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        with Sender([engine.url], timeout_s=2.0) as sender:
            os.kill(engine.process.pid, signal.SIGSTOP)
            with pytest.raises(PushTimeout, match=engine.url) as raised:
                sender.push(trained)
            assert raised.value.weights == "unknown"
            os.kill(engine.process.pid, signal.SIGCONT)
        # The thawed engine finds the request of a push that is no longer sent.
        with Sender([engine.url]) as sender:
            sender.push(trained)
        assert served_digest(engine) == digest_of(trained.state_dict().items())


def prepare_by_hand(engine, trainer, model, push):
    """Make an engine accept a push that is never sent."""
    layout = Layout(open_source(model).specs)
    request = trainer.ask(plan_of(push, layout, 1 << 20, 60.0, owner="by hand"), engine.url)
    assert post(engine, "update_weights_via_ipc_zmq", http.to_json(request)).status_code == 200


def test_a_sender_that_died_after_prepare_is_superseded_by_the_next(engine, trained):
    dead = Trainer()
    prepare_by_hand(engine, dead, trained, "abandoned")
    with Sender([engine.url]) as sender:
        assert sender.status()[engine.url].state == "receiving"
        dead.close()
        sender.push(trained)
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_a_sender_whose_directory_is_gone_does_not_block_the_next(engine, trained):
    gone = Trainer()
    layout = Layout(open_source(trained).specs)
    request = gone.ask(plan_of("gone", layout, 1 << 20, 60.0), engine.url)
    gone.close()
    reply = post(engine, "update_weights_via_ipc_zmq", http.to_json(request))
    assert reply.status_code == 409
    assert "it cannot be read" in reply.json()["message"]
    with Sender([engine.url]) as sender:
        sender.push(trained)
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_files_of_a_killed_trainer_are_swept(engine, model_folder, trained):
    code = (
        "import sys, os; from weightsync import Sender; from tools import models\n"
        f"sender = Sender([{engine.url!r}]); sender.push(models.load_reference({str(model_folder('llama', 0))!r}))\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code])
    killed.wait(120)
    left = [path for path in arenas.SHM_DIRECTORY.iterdir() if path.name.startswith(f"weightsync-{killed.pid}-")]
    assert len(left) == 1
    with Sender([engine.url]) as sender:
        sender.push(trained)
        assert served_digest(engine) == digest_of(trained.state_dict().items())
        arenas.sweep(older_than_s=0.0)
        directories.sweep(older_than_s=0.0)
        assert not left[0].exists()
        sender.push(trained)  # what is alive was spared
    assert not list(directories.directory().glob(f"weightsync-{killed.pid}-*"))


def test_ranks_unmap_the_arena_of_a_closed_sender(engine, trained):
    def mapped():
        return "/dev/shm/weightsync-" in Path(f"/proc/{engine.process.pid}/maps").read_text()

    with Sender([engine.url]) as sender:
        sender.push(trained)
        assert mapped()
    assert not mapped()


def test_nothing_is_left_when_senders_close(engine, trained):
    with Sender([engine.url]) as sender:
        sender.push(trained)
    sender.close()
    mine = f"weightsync-{os.getpid()}-"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(mine)]
    assert not list(directories.directory().glob(f"{mine}*"))


def test_a_failing_loader_leaves_a_dirty_engine_that_a_full_push_repairs(model_folder, trained):
    code = (
        "from weightsync import testing\n"
        "load = testing.ModelAdapter.load\n"
        "def fail_once(self, weights):\n"
        "    testing.ModelAdapter.load = load\n"
        "    next(iter(weights))\n"
        "    raise RuntimeError('out of luck')\n"
        "testing.ModelAdapter.load = fail_once\n"
        "testing.ModelAdapter.loader_hooks = lambda self: 'it fails once'\n"
        "testing.main()\n"
    )
    with ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", code)) as engine:
        with Sender([engine.url]) as sender:
            with pytest.raises(ApplyFailed, match=r"rank 0 failed while loading.*out of luck") as raised:
                sender.push(trained)
            assert raised.value.weights == "dirty"
            assert sender.status()[engine.url].state == "dirty"
            with pytest.raises(requests.HTTPError, match="503"):
                engine.generate(PROMPT, 1)
            sender.push(trained)
            assert sender.status()[engine.url].state == "serving"
        assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_a_manifest_is_sent_once_and_again_if_the_engine_forgot_it(engine, trained, monkeypatch):
    told, prepare = [], EngineClient.prepare

    def listening(self, request, *rest):
        told.append(len(request.manifest))
        return prepare(self, request, *rest)

    monkeypatch.setattr(EngineClient, "prepare", listening)
    source = open_source(trained)
    turned = dict(reversed([*zip((spec.name for spec in source.specs), source.tensors(), strict=True)]))
    whole = len(source.specs)
    with Sender([engine.url]) as sender:
        for _ in range(3):
            sender.push(trained)
        assert told == [whole, 0, 0]
        EngineClient(engine.url, auth.sender_token()).abort("", Deadline(10))
        with Sender([engine.url]) as other:
            other.push(turned)
        sender.push(trained)
        assert told == [whole, 0, 0, whole, 0, whole]
        sender.push(turned)
        assert told[6:] == [whole]
    assert served_digest(engine) == digest_of(trained.state_dict().items())

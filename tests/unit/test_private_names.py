"""Names of an engine, looked up in modules that are there."""

from types import SimpleNamespace

from weightsync.engine.private_names import lacks, missing, missing_below
from weightsync.protocol import http


def test_what_is_gone_is_named_with_its_module():
    needed = {
        "weightsync.tensors.layout": ("Layout.name", "Layout.colour"),
        "weightsync.nowhere": ("x",),
        "json": ("dumps",),
    }
    assert missing(needed) == ["weightsync.tensors.layout.Layout.colour", "weightsync.nowhere.x"]


def test_what_an_instance_lacks_is_named_by_its_path():
    found = SimpleNamespace(inner=SimpleNamespace(there=1))
    assert missing_below(found, ["inner.there", "inner.gone", "gone.too"]) == [
        "SimpleNamespace.inner.gone",
        "SimpleNamespace.gone.too",
    ]


def test_nothing_is_said_where_nothing_is_gone():
    assert lacks("vLLM", "1", "2", []) == ""
    assert lacks("vLLM", "1", "2", ["a.b", "c"]) == "weightsync needs vLLM 1; vLLM 2 lacks a.b, c"


def test_how_a_push_is_verified_is_read_without_its_manifest():
    asked = http.UpdateRequest(
        push="p",
        address="a",
        secret="s",
        bucket_bytes=512,
        timeout_s=1.0,
        verify="deep",
        manifest=(http.TensorSpec("w", "bfloat16", (2,)),),
    )
    assert http.verify_of(http.to_json(asked)) == "deep"
    assert http.verify_of(b'{"push":"p"}') == "off"

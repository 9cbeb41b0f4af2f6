"""The check for an engine's private names, on modules that are installed here."""

from types import SimpleNamespace

import pytest
import requests

from weightsync.engine.private_names import PrivateNames, check_deep, missing, missing_below
from weightsync.errors import UnsupportedOption
from weightsync.protocol import http


def test_a_missing_name_is_reported_with_its_module():
    needed = {
        "weightsync.tensors.layout": ("Layout.name", "Layout.colour"),
        "weightsync.nowhere": ("x",),
        "json": ("dumps",),
    }
    assert missing(needed) == ["weightsync.tensors.layout.Layout.colour", "weightsync.nowhere.x"]


def test_a_missing_attribute_is_reported_by_its_path():
    found = SimpleNamespace(inner=SimpleNamespace(there=1))
    assert missing_below(found, ["inner.there", "inner.gone", "gone.too"]) == [
        "SimpleNamespace.inner.gone",
        "SimpleNamespace.gone.too",
    ]


@pytest.mark.parametrize(
    ("oldest", "newest", "needed"), [("0", "1", "1"), ("900", "901", "900"), ("1", "900", "1 to 900")]
)
def test_missing_names_are_reported_with_the_nearest_tested_version(oldest, newest, needed):
    names = PrivateNames("Requests", "requests", oldest, newest)
    assert names.version() == requests.__version__
    begin = f"weightsync needs Requests {needed}; Requests {requests.__version__} lacks "
    found = SimpleNamespace(there=1)
    assert names.check({"requests": ("get",)}) == names.check_object(found, ["there"], {"requests": ("get",)}) == ""
    assert names.check({"requests": ("a.b", "get", "c")}) == f"{begin}requests.a.b, requests.c"
    assert names.check_object(found, ["b"], {"requests": ("a",)}) == f"{begin}requests.a, SimpleNamespace.b"


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.5.20", False),
        ("0.5.21", True),
        ("0.5.21.post1", True),
        ("0.5.22rc1", True),
        ("0.5.23.post2", True),
        ("0.5.23+cpu", True),
        ("0.5.24", False),
        ("0.6", False),
    ],
)
def test_a_version_outside_of_the_tested_ones_is_said_to_be_untested(monkeypatch, version, tested):
    monkeypatch.setattr(requests, "__version__", version)
    said = PrivateNames("Requests", "requests", "0.5.21", "0.5.23").untested()
    want = f"weightsync was never tested with Requests {version}, only with 0.5.21 to 0.5.23"
    assert said == "" if tested else said.startswith(want)


def test_only_a_deep_push_is_refused_if_a_name_is_missing():
    check_deep('{"push":"p","verify":"deep"}', lambda: "")
    check_deep('{"push":"p","verify":"digest"}', lambda: "x")
    with pytest.raises(UnsupportedOption, match="engine: x; push with"):
        check_deep('{"push":"p","verify":"deep"}', lambda: "x")


def test_the_verify_option_is_read_without_the_manifest():
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

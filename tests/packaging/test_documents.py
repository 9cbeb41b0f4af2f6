"""The documents agree with the code on options, errors, routes, fields, settings and files, and with each other."""

import ast
import re
from dataclasses import fields
from inspect import signature
from typing import get_args

import pytest

from sglang_weightsync import compat_config as sglang_config
from sglang_weightsync.compat import SGLANG
from tests.documents import (
    DOCUMENTS,
    OTHERS,
    PACKAGE,
    ROOT,
    anchors,
    blocks,
    coded,
    links,
    prose,
    read,
    spans,
    table,
)
from vllm_weightsync import compat_config as vllm_config
from vllm_weightsync.compat import VLLM
from weightsync import EngineResult, PushResult, Sender, errors
from weightsync.engine.routes import admin_routes
from weightsync.integrations import verl
from weightsync.protocol import http
from weightsync.protocol.states import ENGINE
from weightsync.trainer.buckets import Staging
from weightsync.trainer.ranks.assembly import CheckReplicas

ROUTES = {route.path[1:]: route.methods for route in admin_routes(lambda: None, "key").routes}
PARAMETERS = signature(Sender).parameters
VALUES = {
    "transport": {"auto", *(name.removeprefix(http.UPDATE) for name in ROUTES if name.startswith(http.UPDATE))},
    "pause": set(get_args(http.PauseMode)),
    "verify": set(get_args(http.Verify)),
    "staging": set(get_args(Staging)),
    "check_replicas": set(get_args(CheckReplicas)),
}


# --- versions, lengths, links, files


def test_the_versions_are_those_that_are_known():
    assert f"written for vLLM {VLLM.tested}, SGLang {SGLANG.tested} " in read("docs/versions.md")
    page, (known,) = read("docs/integrations/verl.md"), verl.VERSIONS
    assert f"\n| verl {known} installs, as extras |" in page
    assert f"\n| `weightsync` pushes into | {VLLM.tested} | none |" in page


def test_the_readme_opens_with_the_status_table():
    status = table("README.md", "status")
    assert any("never run" in row[0] for row in status)
    assert read("README.md").index("| status |") < read("README.md").index("```")
    assert len(read("README.md").splitlines()) <= 150
    assert len(read("ARCHITECTURE.md").splitlines()) < 200


@pytest.mark.parametrize("document", [*DOCUMENTS, *OTHERS])
def test_every_link_has_a_target(document):
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = ((ROOT / document).parent / path).resolve() if path else ROOT / document
        assert target.exists(), f"{document}: {link}"
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT)), f"{document}: {link}"


def test_every_page_is_linked_to():
    linked = {
        ((ROOT / document).parent / link.partition("#")[0]).resolve()
        for document in DOCUMENTS
        for link in links(document)
    }
    assert {ROOT / document for document in DOCUMENTS} - linked == {ROOT / "README.md"}


def is_path(span):
    """Whether a span names a file or a folder of this repository."""
    named = re.fullmatch(r"[\w.-]+(/[\w.*-]+)*/?", span) and not span.startswith(".")
    return bool(named) and ("/" in span or span.endswith((".py", ".md", ".toml")))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document):
    for span in filter(is_path, spans(document)):
        assert any((base / span).exists() for base in (ROOT, PACKAGE)), f"{document}: {span}"


def test_every_file_and_folder_of_the_tree_exists():
    (tree,) = [block for block in blocks("ARCHITECTURE.md") if block.kind == "text"]
    base, named = ROOT, []
    for line in tree.text.splitlines():
        indent = len(line) - len(line.lstrip())
        for name in line[:26].split():
            if not name.endswith(("/", ".py")):
                continue
            named.append({0: ROOT, 2: base, 4: base / named[-1] if named else base}[indent] / name)
            base = named[-1] if indent == 0 and name == "common/weightsync/" else base
    assert [path for path in named if not path.exists()] == []
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= {path.name for path in named}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_define_the_names_that_the_documents_place_in_them(document):
    """Checks ``name`` in ``path``, as ARCHITECTURE.md writes it."""
    for name, path in re.findall(r"`(\w+)` (?:of|in) `([\w/]+\.py)`", prose(document)):
        source = next(base / path for base in (ROOT, PACKAGE) if (base / path).exists()).read_text()
        assert re.search(rf"^(?:class|def) {name}\b", source, re.MULTILINE), f"{name} in {path}"


# --- tables


def test_every_option_is_a_parameter_and_every_parameter_an_option():
    rows = {coded(row[0])[0]: row[1] for row in table("README.md", "option")}
    assert rows.keys() == PARAMETERS.keys() - {"engines"}
    for name, values in VALUES.items():
        assert {word.strip('"') for word in coded(rows[name]) if word.startswith('"')} == values, name
        assert re.search(rf'`"{PARAMETERS[name].default}"` \(default', rows[name]), name
    assert f"(default {PARAMETERS['timeout_s'].default:g})" in rows["timeout_s"]


def test_every_error_is_documented():
    found = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    documented = [name for row in table("README.md", "error") for name in coded(row[0])]
    assert sorted(documented) == sorted(found - {"WeightSyncError"})
    weights = re.search(r"`error\.engines`.*?\n\n", read("README.md"), re.DOTALL)[0]
    assert [word.strip('"') for word in coded(weights) if word.startswith('"')] == list(errors.SEVERITY)


def test_every_route_is_documented():
    documented = {}
    for route, _ in table("docs/operations.md", "route"):
        words = coded(route)
        methods = {word for word in words if word.isupper()}
        documented |= dict.fromkeys(set(words) - methods, methods)
    # A route that answers GET also answers HEAD.
    assert documented == {name: methods - {"HEAD"} for name, methods in ROUTES.items()}


@pytest.mark.parametrize(("first", "kind"), [("field", PushResult), ("field of `EngineResult`", EngineResult)])
def test_every_field_of_a_result_is_documented(first, kind):
    documented = [name for row in table("docs/operations.md", first) for name in coded(row[0])]
    assert sorted(documented) == sorted(field.name for field in fields(kind))


def test_every_state_is_documented():
    assert {name for row in table("docs/states.md", "state of an engine") for name in coded(row[0])} == ENGINE.keys()


def flags(document, first, column):
    """Command-line options of a column."""
    return {
        word.partition(" ")[0][2:] for row in table(document, first) for word in coded(row[column]) if word[:2] == "--"
    }


def test_every_refused_setting_is_documented():
    vllm = {name.rpartition(".")[2].replace("_", "-") for name in vllm_config._ASKED}
    sglang = {name.replace("_", "-") for name in sglang_config._ASKED}
    left = {"speculative-config", "speculative-draft-model-path", "speculative-algorithm", "model-path"}
    left |= {f"data-parallel-{name}" for name in ("size", "size-local", "index", "rank", "rank-local")}
    left |= {"data-parallel-master-ip", "data-parallel-rpc-port", "is-moe"}
    left |= {"dp-size", "pp-size"}
    assert flags("docs/versions.md", "vLLM", 0) == vllm - left
    assert flags("docs/versions.md", "vLLM", 1) == sglang - left


# --- what errors say, what is called


def said_by_the_code():
    """Every string of the package, with a NUL for each formatted value."""
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("*_weightsync/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_quoted_symptoms_are_error_messages():
    quoted = [
        span.partition(": ")
        for row in table("docs/troubleshooting.md", "symptom")
        for span in coded(row[0])
        if re.match(r"[A-Z]\w+: ", span)
    ]
    assert len(quoted) > 10
    texts = list(said_by_the_code())
    for name, _, message in quoted:
        assert hasattr(errors, name)
        assert any(message.removeprefix("... ") in text for text in texts), message


@pytest.mark.parametrize("document", DOCUMENTS)
def test_calls_in_the_text_use_existing_names_and_options(document):
    for span in spans(document):
        try:
            call = ast.parse(span.replace("...", "_"), mode="eval").body
        except SyntaxError:
            continue
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        if name.startswith("sender.") or name in ("push", "rollback"):
            called = getattr(Sender, name.removeprefix("sender."))
        elif name == "Sender":
            called = Sender
        else:
            continue
        known = signature(called).parameters.keys()
        assert {keyword.arg for keyword in call.keywords} <= known, f"{document}: {span}"


# --- drawings


def test_the_sequence_diagram_uses_existing_routes():
    (drawn,) = [block for block in blocks("ARCHITECTURE.md") if block.kind == "mermaid"]
    first, *lines = (line.strip() for line in drawn.text.splitlines())
    assert first == "sequenceDiagram"
    people, depth, routes = set(), 0, set()
    for line in lines:
        if match := re.fullmatch(r"participant (\w) as [\w ]+", line):
            people.add(match[1])
        elif match := re.fullmatch(r"(\w)--?>>(\w): ([^;#]+)", line):
            assert {match[1], match[2]} <= people
            routes |= {word.strip(",") for word in re.findall(r"POST (\S+)", match[3])}
        elif match := re.fullmatch(r"Note over (\w)(?:,(\w))?: [^;#]+", line):
            assert set(filter(None, match.groups())) <= people
        else:
            assert re.fullmatch(r"loop [^;#]+|end", line), line
            depth += 1 if line != "end" else -1
    assert depth == 0
    assert "update_weights_via_NAME" in routes
    assert routes - {"update_weights_via_NAME"} <= ROUTES.keys()

"""Importing one part of the package does not import the others."""

import json
import subprocess
import sys

import pytest

import weightsync

HEAVY = {"torch", "numpy", "requests", "transformers", "zmq"}


def loaded_by(code):
    """The modules that are loaded after ``code`` has run in a new interpreter."""
    said = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return set(json.loads(said.splitlines()[-1]))


def under(modules, package):
    return {name for name in modules if name == package or name.startswith(f"{package}.")}


@pytest.mark.parametrize(
    "module",
    [
        "weightsync",
        "weightsync.errors",
        "weightsync.protocol.http",
        "weightsync.protocol.control",
        "weightsync.protocol.states",
        "weightsync.protocol.auth",
    ],
)
def test_errors_and_messages_import_neither_torch_nor_the_trainer(module):
    loaded = loaded_by(f"import {module}")
    assert loaded & HEAVY == set()
    assert under(loaded, "weightsync.trainer") == set()
    assert under(loaded, "weightsync.engine") == set()


@pytest.mark.parametrize("module", ["receiver", "rank_methods", "front_end", "routes", "loading.loader"])
def test_engine_modules_do_not_import_the_trainer(module):
    assert under(loaded_by(f"import weightsync.engine.{module}"), "weightsync.trainer") == set()


def test_the_trainer_does_not_import_engine_modules():
    assert under(loaded_by("import weightsync; weightsync.Sender"), "weightsync.engine") == set()


@pytest.mark.parametrize("package", ["vllm_weightsync", "sglang_weightsync"])
def test_the_plugins_do_not_import_the_trainer(package):
    assert under(loaded_by(f"import {package}"), "weightsync.trainer") == set()


def test_public_names_are_imported_on_first_use():
    for name in weightsync.__all__:
        assert getattr(weightsync, name) is not None
        assert name in dir(weightsync)
    with pytest.raises(AttributeError, match="'weightsync' has no attribute 'Carrier'"):
        getattr(weightsync, "Carrier")  # noqa: B009 - ruff would have it looked up by mypy


COMMANDS = (["--help"], ["status", "http://127.0.0.1:9", "--timeout", "1"])


def running(command):
    return f"from weightsync.cli import main\ntry: main({command})\nexcept SystemExit: pass"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_imports_neither_torch_nor_numpy(command):
    assert loaded_by(running(command)) & HEAVY == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_imports_one_package_beside_python_s_own(command):
    packages = {name.partition(".")[0] for name in loaded_by(running(command)) - loaded_by("pass")}
    assert packages - sys.stdlib_module_names == {"weightsync", "msgspec", "typing_extensions"}

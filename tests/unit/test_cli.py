"""The command line as programs and watching operators use it."""

import json
import signal
import subprocess
import sys

import pytest

from weightsync import Sender
from weightsync.cli import main
from weightsync.testing import free_port


def test_status_as_json_has_what_the_engine_says(engine, trained, capsys):
    with Sender([engine.url]) as sender:
        sender.push(trained, version="seven")
        absent = f"http://127.0.0.1:{free_port()}"
        assert main(["status", "--json", engine.url, absent]) == 1
    here, gone = map(json.loads, capsys.readouterr().out.splitlines())
    assert (here["url"], here["version"], here["state"], here["engine"]) == (
        engine.url,
        "seven",
        "serving",
        "reference",
    )
    assert here["ranks"][0]["rank"] == 0
    assert (gone["url"], gone["error"]) == (absent, "EngineUnreachable")
    assert absent in gone["message"]


@pytest.mark.parametrize("command", ["abort", "join"])
def test_other_commands_as_json(engine, trained, capsys, command):
    with Sender([engine.url]) as sender:
        sender.push(trained, version="seven")
        trainer = [sender.listen()] if command == "join" else []
        assert main([command, "--json", *trainer, engine.url]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["url"], said["version"]) == (engine.url, "seven")


def test_watching_prints_again_until_it_is_interrupted(engine, trained):
    run = "import sys; from weightsync.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "status", "--json", "--watch", "0.1", engine.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching, Sender([engine.url]) as sender:
        try:
            for version in ("eight", "nine"):
                sender.push(trained, version=version)
                lines = filter(str.strip, iter(watching.stdout.readline, ""))
                assert any(json.loads(line)["version"] == version for line in lines)
        finally:
            watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(30) == 0

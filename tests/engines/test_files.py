"""``weightsync follow``: real engines serve the versions of a folder as they serve what is pushed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from tools import servers
from weightsync.files import Folder

from .conftest import ALL, FAST, NEW_TOKENS, PROMPT, assert_same, configurations, differ

# Without those of `make test`: this takes 10 s.
pytestmark = configurations([wanted for wanted in ALL if wanted not in FAST])


def test_the_versions_of_a_folder_are_served_as_pushes_are(served, tmp_path):
    """A complete version, and two that say what changed."""
    b = load_file(served.b / "model.safetensors")
    changed = {name: tensor.clone() for name, tensor in b.items()}
    for tensor in changed.values():
        tensor.view(-1)[::97] *= -1
    with served.sender() as sender:
        sender.push(changed)
        wanted = {"changed": served.digests()}
        sender.push(b)
        wanted |= dict.fromkeys(("whole", "again"), served.digests())
        sender.push(served.a)
    folder, follow = Folder(tmp_path), [str(Path(sys.executable).with_name("weightsync")), "follow", str(tmp_path)]
    command = [*follow, served.server.url, "--json", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        try:
            lines = filter(str.strip, iter(following.stdout.readline, ""))
            for version, weights in (("whole", b), ("changed", changed), ("again", b)):
                assert folder.write(weights, version=version).full == (version == "whole")
                assert any(json.loads(line).get("version") == version for line in lines)
                assert (served.state().version, served.digests()) == (version, wanted[version])
                answer = servers.greedy(served.server, PROMPT, NEW_TOKENS)
                if version == "changed":
                    assert differ(answer, served.fresh_b.short)
                else:
                    assert_same(answer, served.fresh_b.short)
        finally:
            following.send_signal(signal.SIGINT)
        following.stdout.read()
        assert following.wait(30) == 0

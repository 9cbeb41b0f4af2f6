"""A pushed adapter in every supported version of each engine: these hold adapters, and cache KV, in different ways."""

import dataclasses

import pytest

from tests.engines.conftest import NEW_TOKENS, PROMPT, assert_same, differ, long_prompt
from tests.lora.adapters import make_adapter
from tests.lora.conftest import FOLDERS, OPTIONS
from tests.versions.conftest import EVERY
from tools import models, servers, versions
from weightsync import Sender
from weightsync.errors import ManifestMismatch


@pytest.mark.parametrize("version", EVERY)
def test_an_adapter(version, model_folder, tmp_path):
    engine = version[0]
    if not versions.there(*version):
        pytest.skip(f"{engine} {version[1]} is not installed: make test-versions")
    base = model_folder("llama", 0)
    folders = {name: make_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab", 1)}
    loaded = [f"loaded-{name}={folder}" for name, folder in folders.items()]
    args = [*OPTIONS[engine], FOLDERS[engine], *loaded]
    with servers.start(engine, base, args=args, env=versions.environment(*version)) as server:

        def ask(name, prompt=PROMPT):
            return servers.greedy(dataclasses.replace(server, adapter=name), prompt, NEW_TOKENS)

        before = ask("")
        with Sender([server.url]) as sender:
            for name in "ab":
                sender.push(folders[name], lora="policy", version=name)
                for prompt in (PROMPT, long_prompt() * 2):
                    assert_same(ask("policy", prompt), ask(f"loaded-{name}", prompt))
            assert differ(ask("policy"), before)
            with pytest.raises(ManifestMismatch, match="rank 32 is greater than max_lora_rank 16"):
                sender.push(make_adapter(tmp_path / "wide", base, seed=3, rank=32), lora="policy")
            assert sender.rollback(lora="policy").version == "a"
            assert_same(ask("policy"), ask("loaded-a"))
            assert sender.rollback(lora="policy").version == "b"
            sender.push(models.load_reference(base))
            assert_same(ask("policy"), ask("loaded-b"))
            assert_same(ask(""), before)
            (status,) = sender.status().values()
            assert status.adapters == {"policy": "b"}

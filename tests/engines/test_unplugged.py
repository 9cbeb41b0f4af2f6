"""A server that runs without the plugin."""

from weightsync.protocol.names import START_LINES

from .conftest import UNPLUGGED, configurations

pytestmark = configurations(UNPLUGGED)


def test_a_server_without_the_plugin_is_reported_with_a_start_line(served):
    if served.server.engine == "sglang":
        line = "SGLANG_PLUGINS=weightsync python -m sglang.launch_server --model-path"
    else:
        line = "VLLM_PLUGINS=weightsync vllm serve"
    assert f"Start it as: {START_LINES[served.server.engine].partition('{')[0]}" in str(served.refusal)
    assert line in str(served.refusal)


def test_the_doctor_says_why_the_plugin_is_not_loaded(served):
    (found,) = served.unplugged
    assert found.check == "plugin"
    why = {"vllm": "VLLM_PLUGINS of process", "sglang": "a sglang server answers without weightsync"}
    assert why[served.server.engine] in found.text
    assert f"{served.server.engine.upper()}_PLUGINS=" in found.mend
    assert "weightsync" in found.mend

"""Run by vLLM's Python: ``inside_vllm.py FOLDER`` prints as JSON what compat says of vLLM's real configurations."""

import contextlib
import importlib
import json
import sys

from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding

from tests.engines.recorded import one_element_calls
from vllm_weightsync import compat, compat_config, compat_models, rank
from weightsync.engine.private_names import check_deep
from weightsync.errors import UnsupportedOption
from weightsync.protocol import http


def config(**args):
    return EngineArgs(model=sys.argv[1], max_model_len=256, **args).create_engine_config()


def connector(name, role="kv_both", **extra):
    return KVTransferConfig(kv_connector=name, kv_role=role, kv_connector_extra_config=extra)


def settings():
    """The reason why each setting is refused; empty if it is not."""
    said = {"none": compat_config.unsupported(config())}
    found = config()
    connectors = {
        "cpu tier": connector("OffloadingConnector", cpu_bytes_to_use=1 << 20),
        "second tier": connector("OffloadingConnector", spec_name="TieringOffloadingSpec"),
        "lmcache": connector("LMCacheConnectorV1"),
        "producer": connector("NixlConnector", role="kv_producer"),
        "nixl": connector("NixlConnector"),
        "store": connector("MooncakeStoreConnector"),
        "several, all dropped": connector(
            "MultiConnector", connectors=[{"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}]
        ),
        "several, one kept": connector(
            "MultiConnector",
            connectors=[
                {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"},
                {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            ],
        ),
    }
    for name, found.kv_transfer_config in connectors.items():
        said[name] = compat_config.unsupported(found)
    found.kv_transfer_config = None
    found.ec_transfer_config = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    said["encoder"] = compat_config.unsupported(found)
    # On a CPU vLLM accepts neither as an argument.
    found = config()
    found.parallel_config.enable_eplb = True
    said["eplb"] = compat_config.unsupported(found)
    found = config()
    found.parallel_config.data_parallel_size = 2
    found.parallel_config.data_parallel_rank_local = None
    said["data parallel"] = compat_config.unsupported(found)
    found.parallel_config.data_parallel_hybrid_lb = True
    said["balanced elsewhere"] = compat_config.unsupported(found)
    found.model_config.get_num_experts = lambda: 4
    said["experts, hybrid"] = compat_config.unsupported(found)
    found.parallel_config.data_parallel_hybrid_lb = False
    found.parallel_config.data_parallel_external_lb = True
    said["experts, external"] = compat_config.unsupported(found)
    found.parallel_config.data_parallel_external_lb = False
    said["experts, data parallel"] = compat_config.unsupported(found)
    found.parallel_config.data_parallel_rank_local = 0
    said["experts, offline"] = compat_config.unsupported(found)
    return said


def deep():
    """The errors of pushes with each ``verify`` when a name is missing that only ``verify="deep"`` needs."""
    del rotary_embedding._ROPE_DICT
    said = {"core": compat.VLLM.check(compat.WORKER) or compat.VLLM.check(compat.SERVER)}
    for verify in ("digest", "deep"):
        said[verify] = ""
        try:
            asked = http.to_json({"push": "p", "verify": verify, "manifest": []})
            check_deep(asked, lambda: compat.VLLM.check(compat_models.DEEP))
        except UnsupportedOption as error:
            said[verify] = str(error)
    return said


def drafts():
    """What status reports of each draft model."""
    drafting = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    model = {"method": "draft_model", "model": sys.argv[1], "num_speculative_tokens": 2}
    return {
        name: compat_config.left_as_it_is(config(speculative_config=wanted))
        for name, wanted in (("none", None), ("ngram", drafting), ("model", model))
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        calls = one_element_calls(lambda: importlib.reload(rank))
        found = {"settings": settings(), "drafts": drafts(), "deep": deep(), "first calls": calls}
    print(json.dumps(found))

"""Has SGLang start with a draft model on any CPU: without the kernels that drafting takes, which need AMX.

It cannot generate then, but it loads both models, and takes pushes.
"""

from tests import after_import


def _drafting(module):
    module.DraftBackendFactory.create_decode_backend = lambda self: None
    module.DraftBackendFactory.create_draft_extend_backend = lambda self: None


def _memory(module):
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None


after_import.change({"sglang.srt.speculative.draft_utils": _drafting, "sglang.srt.mem_cache.memory_pool": _memory})

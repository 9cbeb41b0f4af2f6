"""Has SGLang start with a hybrid model on any CPU: without the kernels of linear attention, which need AMX.

It cannot generate then, but it loads the model, and takes pushes. Its kernels read the weights of a convolution from a
view that is neither a parameter nor a buffer; here that is in the digest too.
"""

from tests import after_import


def _without_kernels(module):
    module.attn_backend_wrapper = lambda runner, backend: backend


def _with_views(module):
    model = module.Qwen3NextForCausalLM

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        yield from super(model, self).named_buffers(prefix, recurse, remove_duplicate)
        if not remove_duplicate:  # as for a digest
            for name, part in self.named_modules(prefix=prefix):
                if isinstance(part, module.RadixLinearAttention):
                    yield f"{name}.conv_weights", part.conv_weights

    model.named_buffers = named_buffers


after_import.change(
    {
        "sglang.srt.layers.attention.attention_registry": _without_kernels,
        "sglang.srt.models.qwen3_next": _with_views,
    }
)

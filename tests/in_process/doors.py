"""The engines as a trainer has them in its own process; imports the engine whose Python runs this.

A door is used by one thread: `generate` returns greedy tokens and their logprobs, `Long` is a request that goes on.
"""

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future

PROMPT = list(b"Once upon a time there was a policy that ")
NEW_TOKENS = 24
LENGTH = 4096
#: Tokens of a request that is enqueued before a push, and waited for after it.
ENQUEUED = 400
#: More tokens than an engine generates while a push runs, however slow the machine.
MANY = 3000


class Long:
    """A request in another thread, which goes on until `end`; ``tokens`` is then a future of what it generated."""

    def __init__(self, act):
        self.tokens = Future()
        self.began, self._end = threading.Event(), threading.Event()
        threading.Thread(target=self._run, args=(act,), daemon=True).start()
        assert self.began.wait(120)

    def _run(self, act):
        try:
            self.tokens.set_result(act(self.began.set, self._end))
        except BaseException as error:
            self.tokens.set_exception(error)
            self.began.set()

    def end(self):
        self._end.set()


class Llm:
    """`vllm.LLM`; with ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` its engine core runs in this process."""

    #: Whether a push waits for a request to end; whether an engine that must not generate refuses requests.
    waits, refuses = True, True
    own_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"

    def __init__(self, folder):
        from vllm import LLM

        self.engine = LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=LENGTH)

    def generate(self, prompt, n, **options):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=n, logprobs=0, ignore_eos=True)
        options = {"use_tqdm": False, **options}
        (found,) = self.engine.generate([{"prompt_token_ids": prompt}], sampling, **options)
        return answer(found.outputs[0])

    def enqueue(self, prompt, n):
        from vllm import SamplingParams

        self.engine.enqueue(
            [{"prompt_token_ids": prompt}], SamplingParams(max_tokens=n, ignore_eos=True), use_tqdm=False
        )

    def wait(self):
        """The number of tokens of what was enqueued."""
        (found,) = self.engine.wait_for_completion(use_tqdm=False)
        return len(found.outputs[0].token_ids)

    def long(self, prompt):
        from tqdm import tqdm

        def act(began, end):
            def bar(*args, **kwargs):  # vLLM calls it in the midst of `generate`
                began()
                end.wait()
                return tqdm(*args, **kwargs)  # which vLLM asks for the time

            return self.generate(prompt, 8, use_tqdm=bar)[0]

        return Long(act)

    def close(self):
        self.engine.llm_engine.engine_core.shutdown()


def answer(completion):
    """Tokens and logprobs of a completion of vLLM."""
    tokens = list(completion.token_ids)
    return tokens, [found[token].logprob for token, found in zip(tokens, completion.logprobs, strict=True)]


class Loop:
    """A user's event loop, in a thread of its own."""

    waits, refuses = False, False

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, started):
        return asyncio.run_coroutine_threadsafe(started, self.loop).result()

    def generate(self, prompt, n):
        return self.run(self.answer(prompt, n))

    def long(self, prompt):
        def act(began, end):
            async def stream():
                async with contextlib.aclosing(self.stream(prompt)) as tokens:
                    async for found in tokens:
                        began()
                        if end.is_set():
                            return found
                return []

            return self.run(stream())

        return Long(act)


class AsyncLlm(Loop):
    """`vllm.AsyncLLM`."""

    def __init__(self, folder):
        super().__init__()
        self.engine = self.run(self._make(folder))

    async def _make(self, folder):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=LENGTH)
        return AsyncLLM.from_engine_args(args)

    def _outputs(self, prompt, n):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=n, logprobs=0, ignore_eos=True)
        return self.engine.generate({"prompt_token_ids": prompt}, sampling, request_id=os.urandom(8).hex())

    async def answer(self, prompt, n):
        *_, last = [found async for found in self._outputs(prompt, n)]
        return answer(last.outputs[0])

    async def stream(self, prompt):
        async for found in self._outputs(prompt, MANY):
            yield list(found.outputs[0].token_ids)

    def close(self):
        self.loop.call_soon_threadsafe(self.engine.shutdown)
        while not self.engine.errored:
            threading.Event().wait(0.05)


ENGINE = {
    "dtype": "bfloat16",
    "context_length": LENGTH,
    "max_total_tokens": 4 * LENGTH,
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "log_level": "warning",
}


class Engine:
    """`sglang.Engine`."""

    waits, refuses = False, True

    def __init__(self, folder):
        import sglang

        self.engine = sglang.Engine(model_path=str(folder), **ENGINE)

    def _request(self, prompt, n):
        sampling = {"max_new_tokens": n, "temperature": 0, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    def generate(self, prompt, n):
        return answer_of_sglang(self.engine.generate(**self._request(prompt, n)))

    def long(self, prompt):
        def act(began, end):
            found = []
            for chunk in self.engine.generate(**self._request(prompt, MANY), stream=True):
                found = answer_of_sglang(chunk)[0]
                began()
                if end.is_set():
                    break
            return found

        return Long(act)

    def close(self):
        self.engine.shutdown()


def answer_of_sglang(found):
    """Tokens and logprobs of an answer of SGLang."""
    pairs = found["meta_info"]["output_token_logprobs"]
    return [token for _, token, *_ in pairs], [logprob for logprob, *_ in pairs]


class EngineInLoop(Loop, Engine):
    """`sglang.Engine`, used with coroutines."""

    def __init__(self, folder):
        Loop.__init__(self)
        self.run(self._make(folder))

    async def _make(self, folder):
        Engine.__init__(self, folder)

    async def answer(self, prompt, n):
        return answer_of_sglang(await self.engine.async_generate(**self._request(prompt, n)))

    async def stream(self, prompt):
        async for chunk in await self.engine.async_generate(**self._request(prompt, MANY), stream=True):
            yield answer_of_sglang(chunk)[0]

    def close(self):
        Engine.close(self)


DOORS = {"LLM": Llm, "AsyncLLM": AsyncLlm, "Engine": Engine, "EngineInLoop": EngineInLoop}

"""Requests to an engine with LoRA."""

import requests

from tests.engines.conftest import PROMPT
from tools import servers


def post(served, route, **body):
    where = "/v1" if served.engine == "vllm" else ""
    requests.post(f"{served.server.url}{where}/{route}", json=body, timeout=60).raise_for_status()


def load(served, name, folder):
    post(served, "load_lora_adapter", lora_name=name, lora_path=str(folder))


def completed(served, model):
    """The logprobs of an OpenAI completion."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    answer = requests.post(f"{served.server.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def cached_tokens(served, prompt):
    body = servers.answer(served.asked("policy"), prompt, 1)
    if served.engine == "vllm":
        return (body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return body["meta_info"]["cached_tokens"]

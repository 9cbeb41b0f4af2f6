"""The engines' own ways to load a checkpoint that was saved, which weight pushes are compared with."""

from __future__ import annotations

from pathlib import Path

import requests


def load_saved(engine: str, url: str, folder: Path, timeout_s: float) -> None:
    """Have an engine load ``folder`` and drop its caches. vLLM has the route for it in its development mode alone."""
    if engine == "sglang":
        answer = _post(url, "update_weights_from_disk", {"model_path": str(folder)}, timeout_s)
        if not answer.json().get("success"):
            raise RuntimeError(f"update_weights_from_disk: {answer.text[:500]}")
        return
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    _post(url, "collective_rpc", load, timeout_s)
    _post(url, "reset_prefix_cache", {}, timeout_s)


def _post(url: str, route: str, body: dict[str, object], timeout_s: float) -> requests.Response:
    answer = requests.post(f"{url}/{route}", json=body, timeout=timeout_s)
    if not answer.ok:
        raise RuntimeError(f"{route} answered {answer.status_code}: {answer.text[:500]}")
    return answer

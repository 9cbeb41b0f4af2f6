"""One of several servers of a reference engine: ``-m tests.unit.two_servers first|other SOCKET MODEL --port PORT``."""

import argparse
import asyncio
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from weightsync.engine import metrics, servers
from weightsync.engine.front_end import FrontEnd
from weightsync.engine.routes import HealthGuard, admin_routes
from weightsync.protocol import auth
from weightsync.testing import ModelAdapter, ReferenceFrontEnd, metrics_routes


async def health(_):
    return JSONResponse({"from": "the engine"})


async def main(role, port, path, folder):
    if role == "first":
        adapter = ModelAdapter(folder, torch.device("cpu"))
        found = FrontEnd(ReferenceFrontEnd(adapter, folder, waits=False), metrics.of_server())
        listening = await servers.answer_others(found, path)
        assert listening.is_serving()
    else:
        found = servers.Elsewhere(path)
    guard, admin = HealthGuard(lambda: found), admin_routes(lambda: found, auth.engine_token())
    app = Starlette(routes=[guard, *metrics_routes(), Route("/health", health), admin])
    await uvicorn.Server(uvicorn.Config(app, port=port, log_level="error")).serve()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    for name in ("socket", "model"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--device")
    asked = parser.parse_args()
    asyncio.run(main(asked.role, asked.port, asked.socket, asked.model))

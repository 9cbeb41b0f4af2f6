"""Push into an engine of two servers, traced by OpenTelemetry's SDK; print the spans of each push: ``-m ... SOCKET``.

The first push goes to the server that has the front end, the second to the other.
"""

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvicorn
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette

from tests.unit.two_ranks import WEIGHTS, Front
from weightsync import Sender
from weightsync.engine import routes, servers
from weightsync.protocol import auth


async def serve(found):
    """Serve the routes of a front end on a free port: the server, its task and its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    app = Starlette(routes=[routes.admin_routes(lambda: found, auth.engine_token())])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    return server, asyncio.ensure_future(server.serve([listening])), f"http://127.0.0.1:{listening.getsockname()[1]}"


def pushed(url, label, exporter):
    exporter.clear()
    with Sender([url]) as sender:
        sender.push(WEIGHTS[1], version=label)
    spans = exporter.get_finished_spans()
    return [
        {
            "name": span.name,
            "trace": span.context.trace_id,
            "id": span.context.span_id,
            "parent": span.parent and span.parent.span_id,
            "attributes": dict(span.attributes),
        }
        for span in spans
    ]


async def main(path):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    front = Front()
    answering = await servers.answer_others(front.front_end, path)
    served = [await serve(found) for found in (front.front_end, servers.Elsewhere(path))]
    print(
        json.dumps(
            [
                await asyncio.to_thread(pushed, url, label, exporter)
                for (_, _, url), label in zip(served, ("one", "two"), strict=True)
            ]
        )
    )
    for server, task, _ in served:
        server.should_exit = True
        await task
    answering.close()
    front.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

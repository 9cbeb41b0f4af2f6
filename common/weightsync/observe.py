"""What both sides need to be observed: metrics where prometheus_client is installed, spans where a program traces.

Neither package is a dependency. Without prometheus_client there are no metrics. OpenTelemetry is never imported here: a
program that traces has imported it, and has configured a provider; otherwise a span costs one look-up.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

logger = logging.getLogger(__name__)

#: Upper bounds, in seconds, of what is counted: from a push that moves nothing to one that reaches its deadline.
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_T = TypeVar("_T")


def metrics(make: Callable[[Any], _T]) -> _T | None:
    """``make(prometheus_client)``, or None without that package, or if it fails: no push fails for lack of metrics.

    prometheus_client decides when it is imported whether it works in multi-process mode, so call this as late as the
    engine itself imports it.
    """
    try:
        import prometheus_client
    except ImportError:
        return None
    try:
        return make(prometheus_client)
    except Exception as error:  # a folder for several processes that cannot be written to, or names that are taken
        logger.warning("there are no metrics of weightsync: %s: %s", type(error).__name__, error)
        return None


def span(name: str, **attributes: str) -> AbstractContextManager[object]:
    """A span that is current inside the context; ``attributes`` get the prefix ``weightsync.``."""
    if (trace := _traced()) is None:
        return contextlib.nullcontext()
    named = {f"weightsync.{key}": value for key, value in attributes.items()}
    made: AbstractContextManager[object] = trace.get_tracer("weightsync").start_as_current_span(name, attributes=named)
    return made


def describe(**attributes: str | int) -> None:
    """Add attributes, as those of `span`, to the current span."""
    if (trace := _traced()) is not None:
        trace.get_current_span().set_attributes({f"weightsync.{key}": value for key, value in attributes.items()})


def trace_headers() -> dict[str, str]:
    """The HTTP headers by which another process joins the current trace."""
    headers: dict[str, str] = {}
    if _traced() is not None:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


@contextlib.contextmanager
def joined(headers: Mapping[str, str]) -> Iterator[None]:
    """Inside the context, spans are part of the trace of the process that sent ``headers``."""
    if _traced() is None:
        yield
        return
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


def carried(call: Callable[[], _T]) -> Callable[[], _T]:
    """``call`` for another thread, in which spans have the same parent as here."""
    if _traced() is None:
        return call
    here = contextvars.copy_context()
    return lambda: here.run(call)


def _traced() -> Any | None:
    """`opentelemetry.trace`, if this process traces."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace

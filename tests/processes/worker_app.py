"""A host application for tests with several workers, `tests.processes.worker_app:app`; AGENT_REACH_* says the rest.

The client is made while the module is imported: by gunicorn with --preload that is before the workers are forked.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from agent_reach import ReachClient, ReachConfig, RegistryConfig, register_agent


@register_agent("echo.say.v1", idempotent=True)
async def say(text: str) -> dict[str, object]:
    """Give the text back, with the pid."""
    return {"text": text, "pid": os.getpid()}


reach = ReachClient(handlers=[say], config=ReachConfig(registry=RegistryConfig(lease_ttl_s=2.0)))
made_in = os.getpid()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with reach:
        yield


app = FastAPI(lifespan=lifespan)
if "AGENT_REACH_LISTEN" not in os.environ:
    # Else each worker has a port of its own for its agent.
    app.mount("/agents", reach.asgi())


@app.get("/who")
async def who() -> dict[str, object]:
    """Tell which worker this is, and how its client stands."""
    state = reach.state
    return {
        "pid": os.getpid(),
        "made_in": made_in,
        "agent_id": state.agent_id,
        "registration": state.registration,
        "error": type(state.registry_error).__name__,
        "detail": state.registration_detail,
    }

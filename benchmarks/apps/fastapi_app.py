"""FastAPI with a ``def`` endpoint that blocks."""

from __future__ import annotations

import time

from fastapi import FastAPI

app = FastAPI()


@app.get("/")
async def index() -> str:
    return "up"


@app.get("/sleep")
def sleep(ms: int) -> str:
    time.sleep(ms / 1000)
    return "done"

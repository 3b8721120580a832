"""FastAPI with most of what its users use: ``fastapi_site:app``; documentation at /docs and /openapi.json."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field


class Item(BaseModel):
    name: str = Field(min_length=1, max_length=40)
    price: float = Field(gt=0)
    tags: list[str] = []


class Stored(Item):
    id: int


class Ledger:
    """Stands in for a database session: counts those that are open."""

    open = 0

    def __init__(self) -> None:
        self.items = [Stored(id=1, name="mug", price=6.5, tags=["kitchen"]), Stored(id=2, name="lamp", price=42)]


def ledger() -> Iterator[Ledger]:
    Ledger.open += 1
    try:
        yield Ledger()
    finally:
        Ledger.open -= 1


UsesLedger = Annotated[Ledger, Depends(ledger)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    yield {"greeting": "hello from lifespan"}


items = APIRouter(prefix="/items", tags=["items"])


@items.get("/")
def list_items(db: UsesLedger, tag: str | None = None) -> list[Stored]:
    return [item for item in db.items if tag is None or tag in item.tags]


@items.get("/{id}")
async def read_item(id: int, db: UsesLedger) -> Stored:
    for item in db.items:
        if item.id == id:
            return item
    raise HTTPException(404, "no such item")


@items.post("/", status_code=201)
async def create_item(item: Item, db: UsesLedger) -> Stored:
    return Stored(id=len(db.items) + 1, **item.model_dump())


app = FastAPI(title="Items", lifespan=lifespan)
app.include_router(items)


@app.get("/")
async def home(request: Request) -> dict[str, str]:
    return {"greeting": request.state.greeting}


@app.get("/thread")
def thread() -> dict[str, Any]:
    return {"thread": threading.current_thread().name, "ledgers": Ledger.open}


@app.get("/lazy")
def lazy() -> dict[str, str]:
    import decimal
    import fractions

    return {"half": str(decimal.Decimal(1) / 2), "third": str(fractions.Fraction(1, 3))}


@app.get("/stream/{count}")
def stream(count: int) -> StreamingResponse:
    return StreamingResponse((f"line {number}\n" for number in range(count)), media_type="text/plain")


@app.websocket("/ws")
async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(f"echo: {await websocket.receive_text()}")
    except WebSocketDisconnect:
        pass

"""What a request may take, as the operator has set it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jumpstart_server.settings import TenantSettings


@dataclass(frozen=True)
class RequestLimits:
    """
    Options of the same names; times in seconds, and 0 is no limit everywhere but in *queue* and *max_overruns*.

    By default there are none, for an engine that is used without the rest of the server.
    """

    timeout: float = 0
    timeout_extension: float = 0
    first_byte_timeout: float = 0
    idle_timeout: float = 0
    on_deadline: Literal["interrupt", "sever"] = "interrupt"
    max_overruns: int = 16
    limit_concurrency: int = 0
    queue: int = 1000
    queue_timeout: float = 10
    graceful_timeout: float = 30

    @classmethod
    def of(cls, tenant: TenantSettings) -> RequestLimits:
        """What the operator has set."""
        return cls(
            timeout=tenant.timeout,
            timeout_extension=tenant.timeout_extension,
            first_byte_timeout=tenant.first_byte_timeout,
            idle_timeout=tenant.idle_timeout,
            on_deadline=tenant.on_deadline,
            max_overruns=tenant.max_overruns,
            limit_concurrency=tenant.limit_concurrency,
            queue=tenant.queue,
            queue_timeout=tenant.queue_timeout,
            graceful_timeout=tenant.graceful_timeout,
        )

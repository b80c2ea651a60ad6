"""A job as JSON: the same fields for every verb, documented in docs/reference/json.md."""

from typing import Any

import msgspec

from stoker.masking import masked
from stoker.queue.model import Attempt, Job


def job_json(job: Job) -> dict[str, Any]:
    """Without the secrets in its environment: JSON is pasted into chats and kept in logs."""
    told: dict[str, Any] = masked(msgspec.to_builtins(job))
    return told


def attempt_json(attempt: Attempt, host: str | None) -> dict[str, Any]:
    return {**msgspec.to_builtins(attempt), "host": host}

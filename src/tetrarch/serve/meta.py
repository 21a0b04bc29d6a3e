# SPDX-License-Identifier: Apache-2.0
"""`meta_info` of `/generate`: what is known about an output besides its text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tetrarch.engine.request import FinishReason
from tetrarch.executor.step import TokenLogprob
from tetrarch.serve.door import Door
from tetrarch.serve.drafting import as_meta
from tetrarch.serve.outputs import Output

__all__ = ["LogprobLists", "finish_object", "meta_info"]

Triple = tuple[float | None, int, str | None]
"""Logprob (`None` for a token that nothing precedes), token id, token text if asked for."""


def meta_info(door: Door, output: Output) -> dict[str, Any]:
    """Return the keys that do not depend on what the client asked for."""
    versions = output.versions
    info: dict[str, Any] = {
        "id": output.request.rid,
        "finish_reason": finish_object(output.finish),
        "prompt_tokens": len(output.request.prompt_ids),
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.num_cached,
        "reasoning_tokens": 0,
        "weight_version": versions[-1].version if versions else door.weight_version,
        "num_retractions": output.num_retractions,
        "dp_rank": 0,
    }
    if versions:
        info["weight_versions"] = versions
    if output.finish is not None:
        now = time.monotonic()
        info["e2e_latency"] = now - output.timeline.started
        info["response_sent_to_client_ts"] = time.time()
        info.update(_latencies(output.times, num_tokens=len(output.token_ids)))
        info.update(as_meta(output.acceptance))
    return info


def _latencies(times: dict[str, float], *, num_tokens: int) -> dict[str, float]:
    """Seconds between the moments that the engine has noted."""
    found: dict[str, float] = {}
    spans = {
        "queue_time": ("received", "scheduled"),
        "first_token_latency": ("received", "first_token"),
        "decode_time": ("first_token", "finished"),
    }
    for name, (start, end) in spans.items():
        if start in times and end in times:
            found[name] = times[end] - times[start]
    decode_time = found.pop("decode_time", 0.0)
    if num_tokens > 1 and decode_time > 0:
        found["decode_throughput"] = (num_tokens - 1) / decode_time
    return found


def finish_object(finish: FinishReason | None) -> dict[str, Any] | None:
    """Return `finish_reason` in the native shape."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": finish.length}
    abort: dict[str, Any] = {"type": "abort", "message": finish.message or "aborted"}
    if finish.status is not None:  # it failed; nobody asked for it
        abort |= {"status_code": finish.status, "err_type": finish.code}
    return abort


class LogprobLists:
    """The logprob keys of one output, as triples.

    Args:
        text_of: Gives a token's text, or `None` for every token.
        with_top: Report alternatives.
        with_picked: Report the ids that the client named.
    """

    def __init__(
        self, text_of: Callable[[int], str | None], *, with_top: bool, with_picked: bool
    ) -> None:
        self._text_of = text_of
        self._with_top, self._with_picked = with_top, with_picked

    def of_prompt(self, output: Output) -> dict[str, Any]:
        """Return the `input_` keys, from the position that the client named."""
        request = output.request
        scored = output.prompt_logprobs
        start = max(request.logprob_start, 0) if request.logprob_start >= 0 else None
        if start is None:
            return self._keys("input", [], [])
        ids = request.prompt_ids[start:]
        entries = [*[None] * (len(ids) - len(scored)), *scored]
        return self._keys("input", ids, entries)

    def of_output(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the `output_` keys of these tokens."""
        keys = self._keys("output", [entry.token_id for entry in entries], entries)
        return {**keys, "output_token_logprobs_length": len(entries)}

    def _keys(
        self, side: str, ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        keys: dict[str, Any] = {
            f"{side}_token_logprobs": [
                self._triple(None if entry is None else entry.logprob, token_id)
                for token_id, entry in zip(ids, entries, strict=True)
            ]
        }
        if self._with_top:
            keys[f"{side}_top_logprobs"] = [
                None if entry is None else self._triples(entry.top) for entry in entries
            ]
        if self._with_picked:
            keys[f"{side}_token_ids_logprobs"] = [
                None if entry is None else self._triples(entry.picked) for entry in entries
            ]
        return keys

    def _triples(self, pairs: Sequence[tuple[int, float]]) -> list[Triple]:
        return [self._triple(logprob, token_id) for token_id, logprob in pairs]

    def _triple(self, logprob: float | None, token_id: int) -> Triple:
        return (logprob, token_id, self._text_of(token_id))

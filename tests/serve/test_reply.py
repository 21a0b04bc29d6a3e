# SPDX-License-Identifier: Apache-2.0
"""The engine's answers as HTTP."""

from __future__ import annotations

import json

from tetrarch.engine.messages import ControlReply
from tetrarch.serve.reply import reply_response


def test_a_success_is_its_payload_and_what_is_added() -> None:
    reply = ControlReply(ticket=1, ok=True, message="done", payload={"a": 1, "b": 2})
    response = reply_response(reply, {"b": 3})
    assert response.status_code == 200
    assert json.loads(bytes(response.body)) == {"success": True, "message": "done", "a": 1, "b": 3}


def test_a_refusal_is_never_a_success_and_is_json() -> None:
    for told, status in ((200, 400), (400, 400), (500, 500), (503, 503)):
        reply = ControlReply(ticket=1, ok=False, message="no", status=told, code="why")
        response = reply_response(reply)
        assert response.status_code == status
        assert ("retry-after" in response.headers) == (status == 503)
        body = json.loads(bytes(response.body))
        assert body == {
            "success": False,
            "message": "no",
            "error": {"message": "no", "type": "why", "param": None, "code": status},
        }
        assert int(response.headers["content-length"]) == len(bytes(response.body))

# SPDX-License-Identifier: Apache-2.0
"""Failures as HTTP."""

from __future__ import annotations

import json
import pickle

import pytest

from tetrarch.core.errors import CheckpointError, EngineDead, RequestError, TetrarchError
from tetrarch.serve.errors import Failure, HttpError, failure_of, failure_response

REFUSAL = RequestError("n is 0", why="one output at least", fix="send n=1", param="n")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (REFUSAL, 400, "Bad Request"),
        (EngineDead("gone", why="killed", fix="restart"), 503, ""),
        (HttpError(Failure(status=404, message="no")), 404, ""),
        (CheckpointError("bad", why="it is", fix="repair"), 500, ""),
    ],
)
def test_every_error_has_its_status(error: TetrarchError, status: int, kind: str) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.kind) == (status, kind)


def test_openai_clients_read_a_flat_object() -> None:
    response = failure_response(failure_of(REFUSAL), path="/v1/completions")
    assert response.status_code == 400
    assert json.loads(bytes(response.body)) == {
        "object": "error",
        "message": "n is 0; one output at least; send n=1",
        "type": "Bad Request",
        "param": "n",
        "code": 400,
    }


def test_native_clients_read_an_object_under_error() -> None:
    response = failure_response(failure_of(REFUSAL), path="/generate")
    assert json.loads(bytes(response.body))["error"]["message"].startswith("n is 0")


def test_a_dead_engine_asks_to_retry() -> None:
    failure = failure_of(EngineDead("gone", why="killed", fix="restart"))
    response = failure_response(failure, path="/v1/completions")
    assert response.headers["retry-after"] == "5"
    assert json.loads(bytes(response.body))["type"] == "ServiceUnavailableError"


def test_a_refusal_survives_pickling() -> None:
    error = HttpError(Failure(status=404, message="no"))
    assert pickle.loads(pickle.dumps(error)).failure == error.failure

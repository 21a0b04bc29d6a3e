# SPDX-License-Identifier: Apache-2.0
"""Taking the port. That a whole server starts and stops is shown in tests/e2e."""

from __future__ import annotations

import errno
import socket

import pytest

from tetrarch.core.errors import ConfigError
from tetrarch.serve import launch
from tetrarch.serve.launch import bind


def test_port_zero_is_a_free_port() -> None:
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as two:
        host, port = one.getsockname()
        assert host == "127.0.0.1"
        assert port not in (0, two.getsockname()[1])
        socket.create_connection((host, port), timeout=1).close()  # it listens already


def test_a_busy_port_says_who_to_stop_and_where_else_to_go() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            bind("127.0.0.1", port)
    assert refused.value.what == f"cannot listen on 127.0.0.1:{port}"
    assert f"sport = {port}" in refused.value.fix
    assert f"--port {port + 1}" in refused.value.fix


def test_a_port_is_free_again_at_once() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=1)
        first.accept()[0].close()  # this end waits in TIME_WAIT
        client.close()
    with bind("127.0.0.1", port) as second:
        assert second.getsockname()[1] == port


@pytest.mark.parametrize(
    ("host", "says"), [("no.such.host.invalid", "unknown"), ("192.0.2.1", "cannot listen")]
)
def test_a_host_that_is_not_ours_is_refused(host: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        bind(host, 30000)
    assert "--host 127.0.0.1" in refused.value.fix


def test_each_reason_has_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidding(socket.socket):
        def bind(self, _: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(launch.socket, "socket", Forbidding)
    with pytest.raises(ConfigError, match="Permission denied") as refused:
        bind("127.0.0.1", 80)
    assert "1024" in refused.value.fix

"""An S3 server on loopback, and a proxy before it that fails at one request.

The server is moto's, which speaks the protocol of S3. The proxy counts requests.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import fsspec
from fsspec.config import conf

BUCKET = "bucket"
_ERROR = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>InternalError</Code>'
    b"<Message>injected</Message></Error>"
)
# The ways in which a store fails a request, and those that follow if it goes on.
FAULTS = ("drop", "lost answer", "500", "truncated", "stalled")


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server, and lets those from one number on fail.

    Args:
        port: of the server.

    Attributes:
        at: the number of the first request that fails, from 0; ``None`` lets none fail.
        num_failing: how many fail from there on.
        fault: one of ``FAULTS``, or a function that is called in place of an answer.
        only: the methods that are counted; by default all.
        log: method and path of every request.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = port
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.fail(None)

    def start(self) -> None:
        """Serve in a thread, until ``shutdown()``."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def fail(
        self,
        at: int | None,
        fault: str | Callable[[], None] = "drop",
        num_failing: int = 10**9,
        only: tuple[str, ...] = (),
    ) -> None:
        """Count from 0 again, with another fault."""
        with self.lock:
            self.released.set()
            self.released = threading.Event()
            self.at, self.fault, self.num_failing, self.only = at, fault, num_failing, only
            self.count, self.log = 0, list[str]()

    def fault_of(self, line: str) -> str | Callable[[], None] | None:
        with self.lock:
            self.log.append(line)
            if self.only and not line.startswith(self.only):
                return None
            number, self.count = self.count, self.count + 1
            fails = self.at is not None and self.at <= number < self.at + self.num_failing
            return self.fault if fails else None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that a dead client has closed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self._body()
        proxy = cast("Proxy", self.server)
        released = proxy.released
        fault = proxy.fault_of(f"{self.command} {self.path}")
        if callable(fault):
            fault()
        if callable(fault) or fault == "drop":
            self.close_connection = True
            return
        if fault == "stalled":
            released.wait(60)
            self.close_connection = True
            return
        if fault == "500":
            self._answer(500, {"Content-Type": "application/xml"}, _ERROR, len(_ERROR))
            return
        connection = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
        headers["Content-Length"] = str(len(body))
        connection.request(self.command, self.path, body, headers)
        found = connection.getresponse()
        data = found.read()
        connection.close()
        if fault == "lost answer":
            self.close_connection = True
            return
        length = int(found.headers.get("Content-Length", len(data)))
        if fault == "truncated":
            data = data[: len(data) // 2]
            self.close_connection = True
        self._answer(found.status, dict(found.headers), data, length)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815, names of http.server

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while count := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(count))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, headers: dict[str, str], data: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(OSError):
            if self.command != "HEAD":
                self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing; ``format`` is a name of http.server."""


@contextlib.contextmanager
def served() -> Iterator[Proxy]:
    """Start a server with an empty bucket and a proxy, and let fsspec use the proxy."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    proxy.start()
    held, kind = dict(conf), fsspec.get_filesystem_class("s3")
    conf["s3"] = options(proxy.url)
    retries, kind.retries = kind.retries, 2
    try:
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield proxy
    finally:
        proxy.fail(None)
        conf.clear()
        conf.update(held)
        kind.retries = retries
        kind.clear_instance_cache()
        proxy.shutdown()
        proxy.server_close()
        server.stop()


def options(url: str) -> dict[str, Any]:
    """The options of a client of the proxy, whose attempts are few and soon end."""
    return {
        "endpoint_url": url,
        "key": "key",
        "secret": "secret",
        "config_kwargs": {
            "connect_timeout": 2,
            "read_timeout": 2,
            "retries": {"max_attempts": 2, "mode": "standard"},
        },
    }

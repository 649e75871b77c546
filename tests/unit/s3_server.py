"""moto's S3 server behind a small proxy that serialises PUTs and misbehaves on request."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@dataclass
class Fault:
    """What happens to the next `times` requests of a method."""

    method: str
    times: int
    status: int = 0  # answered instead of asking the server; 0 asks it
    after: bool = False  # the server is asked first, its answer is thrown away
    cut: bool = False  # only half of the body is sent, then the connection is closed


@dataclass
class S3Server:
    """A running server; `AWS_...` of this process points at it."""

    port: int
    backend: int
    faults: list[Fault] = field(default_factory=list)
    num_failed: int = 0
    sent: Counter[str] = field(default_factory=Counter)  # bytes of answers to GET, by path
    lock: threading.Lock = field(default_factory=threading.Lock)
    # moto checks whether a name is taken and then puts, in threads: one PUT at a time makes its answer mean something.
    put_lock: threading.Lock = field(default_factory=threading.Lock)

    def new_uri(self) -> str:
        self.num_failed = 0
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def fail(self, method: str, status: int, times: int, after: bool = False) -> None:
        self.faults.append(Fault(method, times, status, after))

    def cut(self, method: str, times: int) -> None:
        self.faults.append(Fault(method, times, cut=True))

    def next_fault(self, method: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and fault.times > 0:
                    fault.times -= 1
                    self.num_failed += 1
                    return fault
        return None


def _handler(server: S3Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = server.next_fault(self.command)
            if fault is not None and fault.status and not fault.after:
                self._answer(fault.status, [], b"")
                return
            with server.put_lock if self.command == "PUT" else contextlib.nullcontext():
                connection = http.client.HTTPConnection("127.0.0.1", server.backend, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                data = response.read()
                headers = response.getheaders()
                connection.close()
            if fault is not None and fault.after:
                self._answer(fault.status, [], b"")
            else:
                self._answer(response.status, headers, data, cut=fault is not None and fault.cut)

        def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False) -> None:
            self.send_response(status)
            length = None
            for name, value in headers:
                if name.lower() == "content-length":
                    length = value
                elif name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            # The answer to HEAD has a length and no body.
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
            self.end_headers()
            if self.command == "GET":
                with server.lock:
                    server.sent[self.path.partition("?")[0]] += len(data)
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.wfile.flush()
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Runs moto and the proxy in this process and points the usual environment at them."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, backend = moto.get_host_and_port()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server = S3Server(proxy.server_port, backend)
    proxy.RequestHandlerClass = _handler(server)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
    }
    try:
        with mock.patch.dict(os.environ, environment):
            connection = http.client.HTTPConnection("127.0.0.1", backend, timeout=60)
            connection.request("PUT", f"/{BUCKET}", headers={"Host": "s3.amazonaws.com"})
            assert connection.getresponse().status == 200
            connection.close()
            yield server
    finally:
        proxy.shutdown()
        proxy.server_close()
        moto.stop()

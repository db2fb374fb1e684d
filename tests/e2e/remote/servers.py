"""Real servers on loopback, and a proxy before them that counts requests and breaks some of them on purpose."""

from __future__ import annotations

import asyncio
import http.client
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.oracle.ranks import free_port

NGINX = """
{user}
worker_processes 1; daemon off; error_log {root}/error.log; pid {root}/nginx.pid;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; types {{}} default_type application/octet-stream;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  server {{
    listen 127.0.0.1:{port};
    root {files};
    location / {{ autoindex off; }}
    location /indexed/ {{ alias {files}/; autoindex on; }}
    location /whole/ {{ alias {files}/; max_ranges 0; autoindex on; }}
  }}
}}
"""


def await_port(port: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@contextmanager
def nginx(files: Path, root: Path) -> Iterator[str]:
    """Serves ``files``: below / without index pages, below /indexed/ with, below /whole/ without ranges."""
    program = shutil.which("nginx")
    assert program is not None
    port = free_port()
    user = "user root;" if os.getuid() == 0 else ""  # else its workers may not look into the tests' directories
    (root / "nginx.conf").write_text(NGINX.format(root=root, files=files, port=port, user=user))
    process = subprocess.Popen([program, "-c", str(root / "nginx.conf"), "-e", str(root / "error.log")])
    try:
        await_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def aiohttp_server(files: Path) -> Iterator[str]:
    """Serves ``files`` with ranges and index pages."""
    from aiohttp import web

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = free_port()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_static("/", files, show_index=True)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@dataclass(frozen=True)
class Seen:
    """One request. ``begin``, ``nbytes``: of its Range; ``sent``: bytes of the answer's body."""

    method: str
    path: str
    query: str
    begin: int | None
    nbytes: int | None
    sent: int


Fault = Callable[[str, str, int | None], str | None]
"""(method, path, begin of the range or number of the part that is sent) to "500", "503" or another status, with S3's
code behind it ("403 AccessDenied"), "reset", "short", "stall", "flip" (one bit of what is sent), or None for a proper
answer."""


@dataclass
class Proxy:
    """``url``: what stands for the server behind. ``fault`` decides what becomes of each request.

    ``seen`` has a request before its answer is sent: a client that has the answer can count on it.
    ``headers`` are added to what is asked, ``answer_headers`` to what is answered, ``query`` to every list of S3.
    """

    url: str
    backend: str
    fault: Fault | None = None
    seen: list[Seen] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    headers: dict[str, str] = field(default_factory=dict)
    answer_headers: dict[str, str] = field(default_factory=dict)
    query: str = ""

    def count(self, method: str = "GET", *, part: str = "") -> int:
        return sum(1 for each in self.seen if each.method == method and part in each.path)

    def sent(self) -> int:
        return sum(each.sent for each in self.seen)

    def changes(self) -> list[tuple[str, str]]:
        """The method of each request that changes something, and the last name of its path."""
        return [(each.method, each.path.rpartition("/")[2]) for each in self.seen if each.method in ("PUT", "DELETE")]

    @contextmanager
    def faulty(self, fault: Fault) -> Iterator[None]:
        """``fault`` decides meanwhile; afterwards ``seen`` has what came since."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None
            self.seen.clear()


def answers(answer: str, method: str, end: str = "") -> Fault:
    """The fault that every request of this kind meets for a path that ends so."""
    return lambda asked, path, begin: answer if asked == method and path.endswith(end) else None


@contextmanager
def proxy(backend: str, kind: type[Proxy] = Proxy) -> Iterator[Any]:
    """A ``kind`` of Proxy, which stands before ``backend`` and passes on what ``Proxy.fault`` lets through."""
    target = urlsplit(backend)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return None

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _forward(self) -> None:
            body = self._body()
            split = urlsplit(self.path)
            path = unquote(split.path)
            asked = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            begin = int(asked[0]) if asked[0] else None
            nbytes = int(asked[2]) - int(asked[0]) + 1 if asked[0] and asked[2] else None
            number = parse_qs(split.query).get("partNumber")
            where = begin if number is None else int(number[0])
            kind = state.fault(self.command, path, where) if state.fault is not None else None
            if kind is not None and kind[:3].isdecimal():
                status, _, code = kind.partition(" ")
                text = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode() if code else b""
                self.send_response(int(status))
                self.send_header("Content-Length", str(len(text)))
                if status == "307":
                    self.send_header("Location", state.backend + self.path)
                if code == "PermanentRedirect":
                    self.send_header("x-amz-bucket-region", "eu-north-1")
                state.seen.append(Seen(self.command, path, split.query, begin, nbytes, 0))
                self.end_headers()
                self.wfile.write(text if self.command != "HEAD" else b"")
                return
            if kind == "stall":
                state.released.wait(60)
            if kind in ("reset", "stall"):
                state.seen.append(Seen(self.command, path, split.query, begin, nbytes, 0))
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return
            if kind == "flip" and body:
                body = body[:-1] + bytes([body[-1] ^ 1])
            link = http.client.HTTPConnection(target.hostname or "", target.port, timeout=120)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "connection")}
            if body or self.command in ("PUT", "POST"):
                headers["Content-Length"] = str(len(body))
            asking = self.path + (state.query if "list-type" in split.query else "")
            link.request(self.command, asking, body, {**headers, **state.headers})
            answer = link.getresponse()
            data = answer.read()
            self.send_response(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", *state.answer_headers):
                    self.send_header(name, value)
            for name, value in state.answer_headers.items():
                self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            if answer.status not in (204, 304) and length is not None:
                self.send_header("Content-Length", length)
            if kind == "short":
                data = data[: len(data) // 2]
                self.close_connection = True
            state.seen.append(Seen(self.command, path, split.query, begin, nbytes, len(data)))
            self.end_headers()
            self.wfile.write(data)
            link.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that went away
    state = kind(f"http://127.0.0.1:{server.server_address[1]}", backend)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)

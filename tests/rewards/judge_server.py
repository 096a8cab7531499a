"""A server that speaks chat completions as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], str]
Behaviour = Callable[[int, dict[str, Any]], Reply]


class Server:
    """Answers the n-th request (from 0) by `behaviour(n, body)`; keeps what it was asked."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times_s: list[float] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    number = len(owner.bodies)
                    owner.bodies.append(body)
                    owner.headers.append(dict(self.headers) | {"path": self.path})
                    owner.times_s.append(time.monotonic())
                    owner.under_way += 1
                    owner.most_under_way = max(owner.most_under_way, owner.under_way)
                status, headers, text = behaviour(number, body)
                with owner.lock:
                    owner.under_way -= 1
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    self.wfile.write(text.encode())
                except (BrokenPipeError, ConnectionResetError):  # the judge gave up waiting
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[Server]:
    server = Server(behaviour)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


def says(content: object) -> Reply:
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})

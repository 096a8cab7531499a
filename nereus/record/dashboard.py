"""A read-only page of a run, served while it runs: the report, written anew when a step has ended.

On the loopback it is open; on any other address every request needs the token of the printed link. It answers
GET only, and only for the page and the run's records.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from nereus.record.decisions import DECISIONS_FILE
from nereus.record.emergencies import EMERGENCIES_FILE
from nereus.record.evaluations import EVALUATIONS_FILE
from nereus.record.metrics import METRICS_FILE
from nereus.record.transitions import TRANSITIONS_FILE

RECORDS = (METRICS_FILE, DECISIONS_FILE, TRANSITIONS_FILE, EMERGENCIES_FILE, EVALUATIONS_FILE)
COOKIE = "nereus-token"
REFRESH = b"<script>setTimeout(() => location.reload(), 5000)</script></html>"

Render = Callable[[], str]


@contextmanager
def served(folder: Path, render: Render, *, host: str, port: int) -> Iterator[str]:
    """Serve `render()` and the records in `folder` in the background; gives the link to open.

    Port 0 takes a free one. Raises OSError when the address cannot be bound.
    """
    token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
    page = _Page(folder, render)

    class Handler(_Handler):
        pass

    Handler.page, Handler.token = page, token
    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="dashboard", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}/" + (f"?token={token}" if token else "")
    finally:
        server.shutdown()
        server.server_close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Page:
    """The page's text, made anew only when a record has changed."""

    def __init__(self, folder: Path, render: Render) -> None:
        self.folder = folder
        self._render = render
        self._lock = threading.Lock()
        self._made_of: tuple[int, ...] | None = None
        self._text = b""

    def text(self) -> bytes:
        files = (self.folder / name for name in RECORDS)
        state = tuple(file.stat().st_size if file.exists() else 0 for file in files)
        with self._lock:
            if state != self._made_of:
                self._text = self._render().encode().replace(b"</html>", REFRESH)
                self._made_of = state
            return self._text


class _Handler(BaseHTTPRequestHandler):
    page: _Page
    token: str

    def do_GET(self) -> None:
        """Answer the page or a record."""
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("token", [""])[0]
        if not self._allowed(given):
            self._answer(HTTPStatus.FORBIDDEN, b"open the link that the run printed, with its token\n")
        elif parts.path == "/":
            self._answer(HTTPStatus.OK, self.page.text(), "text/html; charset=utf-8", given)
        elif parts.path[1:] in RECORDS and (self.page.folder / parts.path[1:]).exists():
            text = (self.page.folder / parts.path[1:]).read_bytes()
            self._answer(HTTPStatus.OK, text, "application/x-ndjson")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is /, and " + ", ".join(RECORDS).encode() + b"\n")

    def _allowed(self, given: str) -> bool:
        if not self.token:
            # A page of another site that resolves its name to 127.0.0.1 must not read the run.
            name = (self.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]")
            return _is_loopback(name)
        cookie = SimpleCookie(self.headers.get("Cookie") or "")
        held = cookie[COOKIE].value if COOKIE in cookie else ""
        return any(hmac.compare_digest(each.encode(), self.token.encode()) for each in (given, held))

    def _answer(self, status: HTTPStatus, text: bytes, kind: str = "text/plain", token: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if token and self.token:
            self.send_header("Set-Cookie", f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Requests hold the token, so they are not logged."""

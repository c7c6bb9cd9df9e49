"""A server between a client and S3 that errs, stalls, lies and loses, as the test says."""

import http.client
import threading
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class Kind(Enum):
    """What goes wrong with a request."""

    ERROR = "says 500"
    BUSY = "says 503"
    DENIED = "says 403"
    STALL = "does not answer"
    STALL_BODY = "stops in the middle of an answer"
    CUT = "closes in the middle of an answer"
    TRICKLE = "answers a byte at a time"
    SHORTER = "says that there is less, and sends less"
    LONGER = "says that there is more"
    FLIP = "changes a bit"
    HANG_UP = "does what it was asked and closes without an answer"
    LOSE = "confirms what it did not store"


class Proxy(ThreadingHTTPServer):
    """Forwards to `target`; `faults` are asked for each request's number, method and path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = urlsplit(target)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.rule = None
        self.requests = []
        self.released = threading.Event()
        self.guard = threading.Lock()

    def handle_error(self, request, client_address):
        """Clients that gave up are what the tests are about."""

    def met(self, method, path):
        """What goes wrong with this request, which is counted."""
        with self.guard:
            self.requests.append((method, path))
            rule = self.rule
            return None if rule is None else rule(len(self.requests), method, path)

    @contextmanager
    def failing(self, kind, *, number=1, lasting=False, methods=None):
        """From the n-th request on, this once or for good, of these methods."""
        self.requests.clear()
        hits = []

        def rule(count, method, _path):
            if methods is not None and method not in methods:
                return None
            if count >= number and (lasting or not hits):
                hits.append(count)
                return kind
            return None

        self.rule = rule
        self.released.clear()
        try:
            yield hits
        finally:
            self.rule = None
            self.released.set()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Nothing."""

    def answer(self):
        """Forward one request, or do what the fault says."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        kind = self.server.met(self.command, self.path)
        if kind is Kind.STALL:
            self.server.released.wait(30)
            self.close_connection = True
            return
        codes = {Kind.ERROR: 500, Kind.BUSY: 503, Kind.DENIED: 403}
        if kind in codes:
            self.send(codes[kind], [], b"<Error><Code>No</Code></Error>", kind)
            return
        if kind is Kind.LOSE and self.command in {"PUT", "DELETE"}:
            self.send(200, [("ETag", '"never-stored"')], b"", kind)
            return
        status, headers, data = self.forwarded(body)
        if kind is Kind.HANG_UP:
            self.close_connection = True
            return
        self.send(status, headers, data, kind)

    def forwarded(self, body):
        """What the real server answers."""
        target = self.server.target
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        connection.request(self.command, self.path, body=body, headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        found = [(k, v) for k, v in answer.getheaders() if k.lower() not in HOP]
        if self.command == "HEAD":
            data = int(answer.getheader("content-length") or 0)
        connection.close()
        return answer.status, found, data

    def send(self, status, headers, data, kind):
        """An answer, right or not; the data of HEAD is its length."""
        nbytes = data if isinstance(data, int) else len(data)
        if kind is Kind.SHORTER:
            nbytes = nbytes // 2
            data = data if isinstance(data, int) else data[:nbytes]
        if kind is Kind.FLIP and not isinstance(data, int) and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        said = nbytes * 2 + 7 if kind is Kind.LONGER else nbytes
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(said))
        self.end_headers()
        if isinstance(data, int) or self.command == "HEAD":
            return
        self.send_body(data, kind)

    def send_body(self, data, kind):
        """The bytes of an answer, in their own time."""
        if kind in {Kind.CUT, Kind.STALL_BODY}:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if kind is Kind.STALL_BODY:
                self.server.released.wait(30)
            self.close_connection = True
            return
        if kind is Kind.TRICKLE:
            for at in range(len(data)):
                self.wfile.write(data[at : at + 1])
                self.wfile.flush()
                if self.server.released.wait(0.05):
                    return
            return
        self.wfile.write(data)
        if kind is Kind.LONGER:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815 - the base class's


@contextmanager
def between(target):
    """A proxy before `target`, until the end."""
    proxy = Proxy(target)
    thread = threading.Thread(
        target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()

"""A metadata service on loopback that answers as the documents of a cloud say, or does not."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

_PATIENCE_SECONDS = 60.0


@dataclass
class Reply:
    """What is said to one question."""

    status: int = 200
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """One question that came."""

    method: str
    path: str
    headers: dict[str, str]
    query: dict[str, list[str]]


class Cloud:
    """Holds what is announced; `answer` makes a reply of it."""

    def __init__(self, answer: Callable[[Cloud, Asked], Reply]) -> None:
        self._answer = answer
        self.values: dict[str, str] = {}
        self.asked: list[Asked] = []
        self.token = "token-1"
        self.fault: str | int = ""  # a status for all questions, or "hang", "garbage", "drip", …
        self.is_closing = threading.Event()
        self._changed = threading.Condition()
        self.address = ""

    def set(self, **values: str) -> None:
        with self._changed:
            self.values.update({name.replace("_", "-"): text for name, text in values.items()})
            self._changed.notify_all()

    def wait_for_change(self, name: str, etag: str, seconds: float) -> str:
        """The value, as soon as it is not the one of this tag."""
        with self._changed:
            self._changed.wait_for(lambda: etag_of(self.values[name]) != etag, seconds)
            return self.values[name]

    def reply(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        return self._answer(self, asked)


def etag_of(text: str) -> str:
    return f"{sum(text.encode()):x}"


def of_aws(cloud: Cloud, asked: Asked) -> Reply:
    """IMDSv2: a token by PUT, then each item with it; 404 for what is not announced."""
    if asked.path == "/latest/api/token":
        ttl = asked.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
        if asked.method != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            return Reply(400)
        return Reply(200, cloud.token)
    if asked.headers.get("x-aws-ec2-metadata-token") != cloud.token:
        return Reply(401)
    name = asked.path.removeprefix("/latest/meta-data/")
    known = {"spot/instance-action": "action", "events/recommendations/rebalance": "rebalance"}
    text = cloud.values.get(known.get(name, ""), "")
    return Reply(200, text) if text else Reply(404, "<html>404 - Not Found</html>")


def of_gcp(cloud: Cloud, asked: Asked) -> Reply:
    """The flavor is asked for and told; a question may be held until the value changes."""
    if asked.headers.get("metadata-flavor") != "Google":
        return Reply(403)
    name = asked.path.removeprefix("/computeMetadata/v1/instance/")
    if name not in cloud.values:
        return Reply(404)
    text = cloud.values[name]
    if "wait_for_change" in asked.query:
        etag = asked.query.get("last_etag", [etag_of(text)])[0]
        text = cloud.wait_for_change(name, etag, float(asked.query["timeout_sec"][0]))
    return Reply(200, text, {"Metadata-Flavor": "Google", "ETag": etag_of(text)})


def of_azure(cloud: Cloud, asked: Asked) -> Reply:
    """A version and a header are asked for, else 400."""
    if asked.headers.get("metadata") != "true" or "api-version" not in asked.query:
        return Reply(400)
    if asked.path == "/metadata/scheduledevents":
        return Reply(200, cloud.values.get("events", '{"DocumentIncarnation": 1, "Events": []}'))
    if asked.path == "/metadata/instance/compute/name":
        return Reply(200, cloud.values.get("name", "west-0"))
    return Reply(404)


@contextmanager
def serve(answer: Callable[[Cloud, Asked], Reply]) -> Iterator[Cloud]:
    """Serve a cloud on a free port; ends with the block, whoever still waits for an answer."""
    cloud = Cloud(answer)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(cloud))
    server.daemon_threads = True
    cloud.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        cloud.is_closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def _handler(cloud: Cloud) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, parts.path, headers, parse_qs(parts.query))
            if isinstance(cloud.fault, int):
                cloud.asked.append(asked)
                self._send(Reply(cloud.fault, "no", {"Metadata-Flavor": "Google"}))
            elif cloud.fault:
                cloud.asked.append(asked)
                self._fail(cloud.fault)
            else:
                self._send(cloud.reply(asked))

        def _fail(self, fault: str) -> None:
            self.close_connection = True
            if fault == "hang":
                cloud.is_closing.wait(_PATIENCE_SECONDS)
            elif fault == "garbage":
                self.wfile.write(b"\x00\xff\x13 this is no HTTP\r\n\r\n")
            elif fault == "drip":  # never late by itself, and never done
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not cloud.is_closing.wait(0.05):
                    self.wfile.write(b"x")
            elif fault == "redirect":
                headers = {"Location": f"{cloud.address}/login", "Metadata-Flavor": "Google"}
                self._send(Reply(302, "", headers))
            elif fault == "words":
                self._send(Reply(200, "<html>welcome</html>", {"Metadata-Flavor": "Google"}))

        def _send(self, reply: Reply) -> None:
            data = reply.text.encode()
            self.send_response_only(reply.status)
            for name, value in {"Date": self.date_time_string(), **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = _serve

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # whoever asked has left
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Nothing: the tests look at what was asked."""

    return Handler


def in_utc(seconds_ahead: float) -> str:
    """A time of AWS."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds_ahead))


def in_gmt(seconds_ahead: float) -> str:
    """A time of Azure."""
    moment = time.gmtime(time.time() + seconds_ahead)
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", moment)

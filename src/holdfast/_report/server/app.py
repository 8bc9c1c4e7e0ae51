"""The addresses of the server and their answers.

A run is named by a key, which is only looked up in the list: no part of a request ever becomes
part of a path on disk.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from holdfast import __version__, _text
from holdfast._diagnose.hangs.stacks import merge_looks
from holdfast._errors import HoldfastError, SettingsError
from holdfast._report import html as report_page
from holdfast._report import openmetrics
from holdfast._report.compare import MOST_RUNS
from holdfast._report.labels import change_labels
from holdfast._report.output import read_output
from holdfast._report.server import access
from holdfast._report.server.index import RunFollower, RunIndex
from holdfast._report.server.live import LiveViews, Sent, ThreadLimit, TooBusy
from holdfast._report.status.ask import ask_look, describe_stacks
from holdfast._store.folder.attempts import lease_holder
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.requests import ask

_MOST_ROWS = 1000  # of one answer
_FIRST_ROWS = 100  # in the page itself
_BODY_SECONDS = 5.0
_PAGE_SECONDS = 0.3  # that a page waits for its view
_MOST_STACK_CHARACTERS = 2_000_000
_NEED_TOKEN = "Open the address that holdfast ui printed: it has the key to this page."

Endpoint = Callable[[Request], Awaitable[Response]]


class Application:
    def __init__(self, index: RunIndex, gate: access.Gate, *, is_read_only: bool) -> None:
        self._index = index
        self._gate = gate
        self._is_read_only = is_read_only
        self._views = LiveViews()
        index.gives_way = self._views.is_busy
        # Views and requests do not wait for each other's threads.
        self._reading, self._acting = ThreadLimit(16), ThreadLimit(16)
        self._routes = [
            Route("/{place}/", self._list, methods=["GET"]),
            Route("/{place}/runs", self._changes, methods=["GET"]),
            Route("/{place}/compare", self._compare, methods=["GET"]),
            Route("/{place}/compared", self._compared, methods=["GET"]),
            Route("/{place}/run/{key}", self._run, methods=["GET"]),
            Route("/{place}/run/{key}/view", self._view, methods=["GET"]),
            Route("/{place}/run/{key}/output", self._output, methods=["GET"]),
        ]
        if not is_read_only:
            self._routes += [
                Route(f"/{{place}}/run/{{key}}/{kind}", self._action(kind), methods=["POST"])
                for kind in ACTIONS
            ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        response = await self._answer(scope, receive)
        for name, value in access.HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers.setdefault("content-security-policy", access.NO_CONTENT_POLICY)
        if response.status_code in (400, 401, 403, 405, 413, 421):
            # A refused client must not keep one of the few connections.
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        request = Request(scope, receive)
        refusal = self._gate.refuse(request)
        if refusal is not None:
            return _words(*refusal, request)
        try:
            return await self._answer_known(request)
        except TooBusy:
            return _words(503, "Too many requests at once; try again.", request)
        except HTTPException as error:
            return _words(error.status_code, error.detail, request)
        except (ClientDisconnect, asyncio.CancelledError):
            raise
        except HoldfastError as error:
            return _words(409, str(error).partition("\n")[0], request)
        except Exception as error:  # noqa: BLE001 - the server goes on, and reports it
            what = _text.name(f"{type(error).__name__}: {error}")
            # Neither place nor query: both are secrets.
            path = "/".join(request.url.path.split("/")[2:])
            print(f"holdfast ui: {request.method} {_text.name(path)}: {what}", file=sys.stderr)
            said = "This could not be answered; the terminal of holdfast ui says why."
            return _words(500, said, request)

    async def _answer_known(self, request: Request) -> Response:
        gate, path = self._gate, request.scope["path"]
        if path == "/" and request.method == "GET" and gate.has_token(request):
            headers = {"location": f"/{gate.keys.place}/", "set-cookie": gate.cookie_header()}
            return Response(status_code=303, headers=headers)
        if path == "/metrics" and request.method in ("GET", "HEAD") and gate.has_token(request):
            return await self._metrics()
        if not gate.has_session(request):
            if gate.is_in_place(request) and gate.comes_from_outside(request):
                return HTMLResponse(report_page.short_page("One moment…", reloads=True))
            return _words(401, _NEED_TOKEN, request)
        if request.method == "POST":
            if not gate.may_post(request):
                said = "This request did not come from a page of this server."
                return _words(403, said, request)
            # Read here, with its limits: an endpoint gets what was kept.
            request.state.body = await _read_body(request)
        return await self._route(request)

    async def _route(self, request: Request) -> Response:
        is_known = False
        for route in self._routes:
            match, found = route.matches(request.scope)
            if match is Match.FULL:
                request.scope.update(found)
                endpoint: Endpoint = route.endpoint
                return await endpoint(request)
            is_known = is_known or match is Match.PARTIAL
        if is_known:
            raise HTTPException(405, "There is no such request here.")
        raise HTTPException(404, "There is nothing at this address.")

    async def _list(self, _: Request) -> Response:
        index = self._index
        here = f"/{self._gate.keys.place}"
        attributes = {
            "data-runs": f"{here}/runs",
            "data-run": f"{here}/run/",
            "data-compare": f"{here}/compare",
            "data-folder": _text.name(index.root),
            "data-version": __version__,
        }
        title = _text.name(index.root.name or index.root)
        rows = report_page.escape(index.table.first(_FIRST_ROWS))
        return _page(report_page.LIST_PAGE, title, rows, attributes)

    async def _changes(self, request: Request) -> Response:
        given = request.query_params.get("since", "0")
        if not (given.isascii() and given.isdigit() and len(given) < 16):
            raise HTTPException(400, "`since` is a number that this server gave.")
        index = self._index
        rows, revision, has_more, starts_over = index.table.since(int(given), _MOST_ROWS)
        found, read = index.counts()
        rest = {
            "revision": revision,
            "more": has_more,
            "starts_over": starts_over,
            "found": found,
            "read": read,
            "done": index.has_found and read >= found,
            "notes": index.notes,
            "now": time.time(),
        }
        # The rows are JSON already.
        body = f'{{"rows":{rows},{json.dumps(rest)[1:]}'.encode()
        return Response(body, media_type="application/json")

    def _find(self, request: Request) -> RunFollower:
        watched = self._index.get(request.path_params["key"])
        if watched is None:
            raise HTTPException(404, "This run is gone.")
        return watched

    def _find_all(self, request: Request) -> list[RunFollower]:
        keys = dict.fromkeys(request.query_params.getlist("run"))
        found = [self._index.get(key) for key in list(keys)[:MOST_RUNS]]
        return [each for each in found if each is not None]

    async def _compare(self, request: Request) -> Response:
        runs = self._find_all(request)
        here = f"/{self._gate.keys.place}"
        attributes = {
            "data-compared": f"{here}/compared",
            "data-index": f"{here}/",
            "data-run": f"{here}/run/",
        }
        title = f"{len(runs)} runs" if len(runs) != 1 else "1 run"
        # Many runs take long to read, so the page is sent first and requests them.
        return _page(report_page.COMPARE_PAGE, title, "null", attributes)

    async def _compared(self, request: Request) -> Response:
        metric = request.query_params.get("metric")
        runs = self._find_all(request)
        sent = await self._reading.run(self._views.compare, runs, metric)
        return _send(request, sent)

    async def _output(self, request: Request) -> Response:
        watched = self._find(request)
        return JSONResponse(await self._reading.run(read_output, watched.folder))

    async def _run(self, request: Request) -> Response:
        watched = self._find(request)
        here = f"/{self._gate.keys.place}"
        address = f"{here}/run/{watched.key}"
        attributes = {
            "data-live": f"{address}/view",
            "data-output": f"{address}/output",
            "data-index": f"{here}/",
        }
        if not self._is_read_only:
            attributes |= {f"data-{kind}": f"{address}/{kind}" for kind in ACTIONS}
            attributes["data-token"] = self._gate.keys.posting
        # If the view is not ready in time, the page is sent first and requests it.
        task = asyncio.ensure_future(self._reading.run(self._views.newest, watched))
        await asyncio.wait({task}, timeout=_PAGE_SECONDS)
        view = "null"
        if task.done():
            view = task.result().body.decode()
        else:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return _page(report_page.RUN_PAGE, watched.name, view, attributes)

    async def _view(self, request: Request) -> Response:
        watched = self._find(request)
        sent = await self._reading.run(self._views.newest, watched)
        return _send(request, sent)

    def _action(self, kind: str) -> Endpoint:
        async def answer(request: Request) -> Response:
            watched = self._find(request)
            said = await self._acting.run(act, kind, watched, request.state.body)
            self._index.look_soon(watched)
            return JSONResponse(said, status_code=200 if said["ok"] else 409)

        return answer

    async def _metrics(self) -> Response:
        text = await self._reading.run(openmetrics.render, self._index.summaries())
        return Response(text, headers={"content-type": openmetrics.CONTENT_TYPE})


async def _read_body(request: Request) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > access.MOST_BODY_BYTES:
                    raise HTTPException(413, "That is more than this server takes.")
    except TimeoutError:
        raise HTTPException(408, "The request did not come to its end.") from None
    return body


def _words(status: int, sentence: str, request: Request) -> Response:
    """A sentence: as a page for people, as JSON for scripts."""
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(report_page.short_page(sentence), status)
    return JSONResponse({"ok": False, "sentence": sentence}, status)


def _page(page: str, title: str, data: str, attributes: dict[str, str]) -> Response:
    policy = f"{report_page.policy(page, is_live=True)}; frame-ancestors 'none'"
    text = report_page.fill_page(page, title, data, attributes)
    return HTMLResponse(text, headers={"content-security-policy": policy})


def _send(request: Request, sent: Sent) -> Response:
    """JSON with a tag: a page that has it already gets no body."""
    headers = {"etag": sent.tag}
    if request.headers.get("if-none-match") == sent.tag:
        return Response(status_code=304, headers=headers)
    return Response(sent.body, media_type="application/json", headers=headers)


# The buttons of a run's page: the same requests that the command line writes.
Answer = dict[str, Any]


def act(kind: str, watched: RunFollower, body: bytes) -> Answer:
    """Called in a thread: a run of another machine is watched for some seconds."""
    try:
        return ACTIONS[kind](watched, body)
    except HoldfastError as error:
        sentence = str(error).partition("\n")[0]
        # The page shows the name of the run, not its path.
        return {"ok": False, "sentence": sentence.removeprefix(f"{watched.folder}: ")}


def _label(watched: RunFollower, body: bytes) -> Answer:
    try:
        change = json.loads(body)
    except ValueError:
        raise SettingsError("The request is not JSON.") from None
    found = change_labels(watched.layout, _text.record(change))
    return {"ok": True, "sentence": "Written into the run folder.", "labels": asdict(found)}


def _stop(watched: RunFollower, _: bytes) -> Answer:
    who = _ask(watched, "stop", reason="holdfast ui", now=False)
    what = "It ends the step that it is in, makes it durable and leaves."
    return {"ok": True, "sentence": f"Asked to stop ({who}). {what}"}


def _save(watched: RunFollower, _: bytes) -> Answer:
    who = _ask(watched, "save")
    what = "It is taken at the end of the step."
    return {"ok": True, "sentence": f"Asked for a checkpoint ({who}). {what}"}


def _stacks(watched: RunFollower, _: bytes) -> Answer:
    found = ask_look(watched.folder)
    if found is None:
        return {"ok": False, "sentence": "Nothing of its processes can be read from here."}
    looks = found["looks"]
    lines = [_text.name(line) for line in merge_looks(looks, found["missing"])]
    errors = filter(None, (look.get("stacks_error") for look in looks))
    unread = [_text.name(f"not all stacks: {error}") for error in errors]
    all_stacks = (text for text, _ in describe_stacks(looks))
    text = "\n".join([*lines, *unread, *all_stacks])[:_MOST_STACK_CHARACTERS]
    # The first line may name a thousand ranks; the text below has all of it.
    sentence = (lines[0] if lines else "Looked at its processes.")[:300]
    return {"ok": True, "sentence": sentence, "stacks": text, "lines": lines}


ACTIONS: dict[str, Callable[[RunFollower, bytes], Answer]] = {
    "stop": _stop,
    "save": _save,
    "stacks": _stacks,
    "labels": _label,
}


def _ask(watched: RunFollower, kind: str, **details: object) -> str:
    folder = watched.folder
    attempt = ask(folder, kind, **details)
    holder = lease_holder(RunLayout(folder), attempt)
    where = f", pid {holder.pid} on {_text.name(holder.host)}" if holder is not None else ""
    return f"attempt {attempt}{where}"

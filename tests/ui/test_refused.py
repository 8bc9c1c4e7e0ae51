"""What the server refuses, asked over a real socket."""

from __future__ import annotations

import pytest

REFUSED = (400, 401, 403, 404, 405, 413, 421)
TRAVERSALS = [
    "../secret.txt",
    "..%2fsecret.txt",
    "%2e%2e/secret.txt",
    "%2e%2e%2fsecret.txt",
    "..%252fsecret.txt",
    "....//secret.txt",
    "..\\secret.txt",
    "..%5csecret.txt",
    "%c0%ae%c0%ae/secret.txt",
    "run/../../secret.txt",
    "run/..%2f..%2fsecret.txt",
    "run/..%2f..%2fsecret.txt/view",
    "run/%2fetc%2fpasswd/view",
    "run//etc/passwd/view",
    "run/a/view",
    "run/group%2fb/view",
    "run/./view",
    "run/..",
    "run/%00/view",
    "run/a%00/view",
    "run/%e2%80%ae/view",
    "run/" + "a" * 5000 + "/view",
    "static/../../secret.txt",
    "runs/../../secret.txt",
    "//etc/passwd",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("path", TRAVERSALS, ids=range(len(TRAVERSALS)))
def test_no_path_leads_out_of_the_folder(ui, path):
    for prefix in (ui.place, "/", ""):
        answer = ui.get(prefix + path or "/", Cookie=ui.cookie)
        assert answer.status in REFUSED, (prefix, answer.body)
        assert b"SECRET" not in answer.body
        assert b"root:" not in answer.body


ADDRESSES = [
    *("", "runs", "runs?since=0", "run/KEY", "run/KEY/view", "run/KEY/output", "nothing"),
    *("compare?run=KEY", "compared?run=KEY"),
]


@pytest.mark.parametrize("path", ADDRESSES)
def test_without_the_cookie_every_address_is_closed(ui, path):
    path = path.replace("KEY", ui.key("a"))
    known = {}
    for cookie in ("", "holdfast-1=x", ui.cookie[:-1], ui.cookie + "x", f"x{ui.cookie}", "é=ü"):
        answer = ui.get(ui.place + path, Cookie=cookie)
        assert answer.status == 401
        assert answer.headers["connection"] == "close"
        known[cookie] = answer.body
    # Nothing tells an address that exists from one that does not.
    assert set(known.values()) == {ui.get("/elsewhere").body}


@pytest.mark.parametrize("token", ["", "x", "TOKEN ", "TOKENx", "TOKE", "TOKEN&token=x", "%00"])
def test_a_wrong_token_opens_nothing(ui, token):
    token = token.replace("TOKEN", ui.token).replace("TOKE", ui.token[:-1]).replace(" ", "%20")
    for path in ("/", "/metrics", ui.place):
        answer = ui.get(f"{path}?token={token}")
        assert answer.status == 401
        assert "set-cookie" not in answer.headers


def test_the_token_opens_only_the_front_door_and_the_metrics(ui):
    assert ui.visit.status == 303
    assert ui.token not in str(ui.visit.headers)
    for path in (ui.place, f"{ui.place}runs", "/elsewhere"):
        assert ui.get(f"{path}?token={ui.token}").status == 401


def test_the_cookie_is_strict_and_for_a_path_that_nobody_can_guess(ui):
    given = ui.visit.headers["set-cookie"]
    assert "HttpOnly" in given
    assert "SameSite=Strict" in given
    assert f"Path={ui.place};" in given
    assert len(ui.place) > 16
    assert ui.get("/" + "x" * 16 + "/runs", Cookie=ui.cookie).status == 401


HOSTS = [
    "evil.example",
    "evil.example:PORT",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.0.0.1.evil.example:PORT",
    "localhost.evil.example:PORT",
    "0.0.0.0:PORT",
    "[::]:PORT",
    "127.0.0.1:PORT@evil.example",
    "127.0.0.1:PORT, evil.example",
    "",
]


@pytest.mark.parametrize("host", HOSTS)
def test_another_host_name_is_refused_even_with_the_key(ui, host):
    host = host.replace("PORT", str(ui.port))
    for path in (f"/?token={ui.token}", f"{ui.place}runs"):
        answer = ui.get(path, Host=host, Cookie=ui.cookie)
        assert answer.status in (400, 421)
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "host", ["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT", "[::1]:PORT"]
)
def test_names_of_this_machine_are_answered(ui, host):
    assert ui.see("runs", Host=host.replace("PORT", str(ui.port))).status == 200


ORIGINS = [
    "http://evil.example",
    "null",
    "http://127.0.0.1:1",
    "https://127.0.0.1:PORT",
    "http://localhost:PORT",
    "http://127.0.0.1:PORT.evil.example",
    "file://",
    "",
]


@pytest.mark.parametrize("origin", ORIGINS)
def test_another_origin_is_refused(ui, origin):
    origin = origin.replace("PORT", str(ui.port))
    assert ui.see("runs", Origin=origin).status == 403
    assert ui.post(f"run/{ui.key('a')}/stop", Origin=origin).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_site_makes_the_browser_send_is_refused(ui, site):
    assert ui.see("runs", **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}).status == 403
    key = ui.key("a")
    assert ui.post(f"run/{key}/stop", **{"Sec-Fetch-Site": site}).status == 403


def test_a_link_from_elsewhere_comes_back_as_a_visit_of_our_own(ui):
    outside = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    answer = ui.get(ui.place, **outside)
    assert answer.status == 200
    assert 'http-equiv="refresh" content="0"' in answer.text
    assert "data-" not in answer.text
    assert ui.get("/x" + ui.place[1:], **outside).status == 401


def test_a_post_needs_the_token_of_a_page(ui):
    path = f"run/{ui.key('a')}/stop"
    for token in ("", "x", ui.token, ui.cookie.partition("=")[2]):
        assert ui.post(path, **{"X-Holdfast-Token": token}).status == 403
    assert ui.post(path, Cookie="").status == 401
    assert ui.post(path).status == 409  # let in, and nobody trains there


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_other_methods_are_refused(ui, method):
    answer = ui.ask(method, f"{ui.place}runs", {"Cookie": ui.cookie})
    assert answer.status in (400, 405)
    assert "access-control-allow-origin" not in answer.headers


def test_a_button_cannot_be_pressed_by_a_link(ui):
    assert ui.see(f"run/{ui.key('a')}/stop").status == 405


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "5000"},
        {"Content-Length": "99999999999999999999"},
        {"Content-Length": "-1"},
        {"Content-Length": "1e9"},
    ],
    ids=str,
)
def test_large_requests_are_refused_before_they_are_read(ui, headers):
    path = f"{ui.place}run/{ui.key('a')}/stop"
    assert ui.ask("POST", path, {"Cookie": ui.cookie, **headers}).status in (400, 413)


def test_every_answer_has_the_headers_that_guard_a_page(ui):
    key = ui.key("a")
    for answer in (ui.get("/"), ui.see(), ui.see(f"run/{key}"), ui.see("runs"), ui.see("no")):
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "server" not in answer.headers


def test_a_number_that_is_none_is_refused(ui):
    for since in ("-1", "x", "1e9", "9" * 40, "٣"):
        quoted = since.encode().decode("latin-1") if since.isascii() else "%D9%A3"
        assert ui.see(f"runs?since={quoted}").status == 400
    assert ui.see("runs?since=999999999").json()["starts_over"] is True

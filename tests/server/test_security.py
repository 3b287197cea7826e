"""The server's door: keys, hosts, sizes, origins, certificates."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import trustme
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.server.running import MakeServer, Running
from tests.server.served_process import served, write_long_model

from loadproof.server.security import BodyLimitMiddleware, LocalHostMiddleware, is_loopback
from loadproof.server.settings import ServerConfig, ServerConfigError
from loadproof.server.tls import tls_context

KEYS = ("first-key", "second-key")
SMALL = ("--num-threads", "1", "--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def locked(make_server: MakeServer) -> Running:
    return make_server(api_keys=KEYS, max_body_size=4096)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def paths_of(server: Running) -> list[tuple[str, str]]:
    """Every route, and some that are none."""
    document = server.app.openapi()["paths"]
    routes = [
        (method.upper(), path.replace("{model}", "m")) for path in document for method in document[path]
    ]
    others = [
        "/",
        "/openapi.json",
        "/nothing",
        "/health/",
        "/health//",
        "/Health",
        "/health/x",
        "/engine",
        "/docs",
    ]
    return [*routes, *(("GET", path) for path in others), ("POST", "/nothing"), ("PUT", "/v1/models")]


def test_every_route_but_health_needs_a_key(locked: Running) -> None:
    with locked.http() as client:
        paths = paths_of(locked)
        assert ("POST", "/v1/chat/completions") in paths
        for method, path in paths:
            answer = client.request(method, path, follow_redirects=False)
            if path == "/health":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == 'Basic realm="loadproof"'


@pytest.mark.parametrize(
    "given",
    [
        *(f"Bearer {key}" for key in KEYS),
        "bearer first-key",
        "Bearer  first-key",
        basic("", "first-key"),
        basic("anybody", "second-key"),
        basic("a", "first-key").replace("Basic", "BASIC"),
    ],
)
def test_each_key_opens(locked: Running, given: str) -> None:
    with locked.http(headers={"authorization": given}) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/openapi.json").status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"Bearer",
        b"first-key",
        b"Bearer first-ke",
        b"Bearer first-keyx",
        b"Bearer FIRST-KEY",
        b"Bearer first-key second-key",
        b"Bearer first-key,second-key",
        b"Bearer \xff\xfe",
        b"Token first-key",
        b"Basic first-key",
        b"Basic !!!",
        basic("first-key", "").encode(),
        basic("first-key", "first-key:").encode(),
        b"Basic " + base64.b64encode(b"first-key"),
        b"Basic " + base64.b64encode(b"\xff:\xff"),
    ],
)
def test_nothing_else_opens(locked: Running, given: bytes) -> None:
    with locked.http() as client:
        answer = client.get("/v1/models", headers=[(b"authorization", given)])
        assert answer.status_code == 401
        assert b"first-key" not in answer.content


def test_a_key_is_text_that_a_header_can_hold() -> None:
    for key in ("", " ", "a ", "\u00e9"):
        with pytest.raises(ServerConfigError, match="an api_key must be ASCII"):
            ServerConfig(api_keys=("good", key))


BODY = json.dumps({"prompt": [1, 2], "max_tokens": 1}).encode()
PAST_LIMIT = BODY + b" " * 4096


def chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/score"])
@pytest.mark.parametrize("says_length", [True, False])
def test_a_body_past_the_limit_is_413(locked: Running, path: str, says_length: bool) -> None:
    content = PAST_LIMIT if says_length else chunks(PAST_LIMIT)
    headers = {"authorization": "Bearer first-key", "content-type": "application/json"}
    with locked.http(headers=headers) as client:
        answer = client.post(path, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        fits = BODY + b" " * (4096 - len(BODY))
        assert client.post("/v1/completions", content=fits).status_code == 200
        assert client.post("/v1/completions", content=chunks(fits)).status_code == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("::1", True),
        ("[::1]", True),
        ("0:0:0:0:0:0:0:1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example.com", False),
        ("127.example.com", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_loopback_is_told_by_the_address(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "localhost",
        "LocalHost:1",
        "localhost.",
        "localhost.:80",
        "localhost:",
        "[::1]",
        "[::1]:8000",
        "proxy.example.com",
        "PROXY.example.com:443",
    ],
)
def test_a_local_server_answers_to_its_names(host: str) -> None:
    assert status_by_host(host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "127.0.0.1.example.com",
        "localhost.example.com:8000",
        "localhost:8000@example.com",
        "localhost:port",
        "localhost:80:80",
        "[::1].example.com",
        "[::2]:8000",
        "::",
        "0.0.0.0",
        "",
        ":8000",
        "localhost, example.com",
    ],
)
def test_a_local_server_refuses_other_names(host: str) -> None:
    assert status_by_host(host) == 403


def status_by_host(host: str) -> int:
    """The status that a request to this name gets of a local server."""
    app = LocalHostMiddleware(_answering, names=("127.0.0.1", "proxy.example.com"))
    transport = httpx.ASGITransport(app=app)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/", headers={"host": host})).status_code

    return asyncio.run(ask())


async def _answering(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_a_page_elsewhere_cannot_use_its_own_name_for_a_local_server(server: Running) -> None:
    with server.http() as client:
        answer = client.get("/v1/models", headers={"host": "rebound.example.com"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host")


def test_cross_origin_is_off_unless_allowed(server: Running, make_server: MakeServer) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    opened = make_server(allowed_origins=("https://a.example",), api_keys=KEYS)
    with server.http() as plain, opened.http() as client:
        assert "access-control-allow-origin" not in plain.get("/v1/models", headers=asked).headers
        preflight = client.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = client.get("/v1/models", headers=asked)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
            401,
            "https://a.example",
        )
        other = client.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_openais_headers_may_come_from_an_allowed_origin(make_server: MakeServer) -> None:
    opened = make_server(allowed_origins=("https://a.example",))
    names = (
        "authorization,content-type,x-request-id,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"
    )
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": names,
    }
    with opened.http() as client:
        preflight = client.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 200
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert set(names.split(",")) <= {name.strip() for name in allowed.split(",")}
        answer = client.get("/version", headers={"origin": "https://a.example"})
        assert (
            answer.headers["access-control-expose-headers"] == "x-request-id, x-ignored-fields, retry-after"
        )


class TestBodyLimit:
    """Whatever the application makes of a body that is cut off."""

    @staticmethod
    def answer(app: ASGIApp, size: int = 3000) -> httpx.Response:
        limited = BodyLimitMiddleware(app, limit=1024)
        transport = httpx.ASGITransport(app=limited)

        async def content() -> AsyncIterator[bytes]:
            for _ in range(size // 100):
                yield bytes(100)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post("/", content=content())

        return asyncio.run(ask())

    def test_one_that_lets_it_fail(self) -> None:
        assert self.answer(_reading).status_code == 413
        assert self.answer(_reading, size=1000).status_code == 200

    def test_one_that_answers_otherwise(self) -> None:
        async def swallowing(scope: Scope, receive: Receive, send: Send) -> None:
            with suppress(Exception):
                await _reading(scope, receive, send)
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"mine"})

        answer = self.answer(swallowing)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"

    def test_one_that_had_answered_before(self) -> None:
        async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
            await _answering(scope, receive, send)
            await _reading(scope, receive, _nowhere)

        assert self.answer(hasty).status_code == 200


async def _reading(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await _answering(scope, receive, send)


async def _nowhere(message: Message) -> None:
    pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``ca.pem``, and two servers' ``a.pem`` and ``b.pem`` with their ``.key``."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    for name in ("a", "b"):
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(str(directory / f"{name}.key"))
        issued.private_key_and_cert_chain_pem.write_to_path(str(directory / f"{name}.both.pem"))
        issued.cert_chain_pems[0].write_to_path(str(directory / f"{name}.pem"))
    return directory


def test_https(certificates: Path, tmp_path: Path) -> None:
    model = str(write_long_model(tmp_path / "tiny"))
    files = ("--ssl-certfile", str(certificates / "a.pem"), "--ssl-keyfile", str(certificates / "a.key"))
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with served(model, *SMALL, *files) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with server.client(verify=context) as client:
            assert client.get("/health").json() == {"status": "ok"}
            answer = client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2})
            assert answer.json()["usage"]["completion_tokens"] == 2
        with server.connect() as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200" not in plain.recv(1000)


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("a.pem", "b.key", "the key is another certificate's"),
        ("a.pem", None, "no certificate chain and key in PEM form"),
        ("a.key", "a.pem", "no certificate chain and key in PEM form"),
        ("a.both.pem", "ca.pem", "no certificate chain and key in PEM form"),
    ],
)
def test_certificates_that_do_not_work(
    certificates: Path, certificate: str, key: str | None, message: str
) -> None:
    config = ServerConfig(
        ssl_certfile=certificates / certificate, ssl_keyfile=None if key is None else certificates / key
    )
    with pytest.raises(ServerConfigError, match=message) as caught:
        tls_context(config)
    assert str(certificates / certificate) in str(caught.value)


def test_certificates_that_work(certificates: Path) -> None:
    assert tls_context(ServerConfig()) is None
    assert tls_context(ServerConfig(ssl_certfile=certificates / "a.both.pem")) is not None


def test_a_key_that_is_encrypted_is_refused_without_asking(certificates: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as to

    key = to.load_pem_private_key((certificates / "a.key").read_bytes(), None)
    locked = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.BestAvailableEncryption(b"secret"))
    path = tmp_path / "locked.key"
    path.write_bytes(locked)
    with pytest.raises(ServerConfigError, match="the key is encrypted"):
        tls_context(ServerConfig(ssl_certfile=certificates / "a.pem", ssl_keyfile=path))


def test_a_warning_where_all_may_come_in(tmp_path: Path) -> None:
    model = str(write_long_model(tmp_path / "tiny"))
    warned = {}
    for keys in ((), ("--api-key", "k")):
        with served(model, *SMALL, "--host", "0.0.0.0", *keys) as server:
            assert server.url.startswith("http://localhost:")
            warned[keys] = [event["message"] for event in server.events if event["level"] == "warning"]
    assert warned == {
        (): ["no api_key is set, so whoever reaches 0.0.0.0 may use the server"],
        ("--api-key", "k"): [],
    }

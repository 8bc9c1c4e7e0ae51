"""Fixtures: a mirror in a folder, a store that speaks S3 on this machine, and a bad network."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast._tools import mirror as by_hand
from tests.mirror.network import Wire
from tests.processes.conftest import LIGHT, gate, light, light_reference  # noqa: F401  fixtures
from tests.support import Trainer, wait_until

_numbers = itertools.count(1)
SIZE = 200_000  # numbers of eight bytes in the state
PIECE_BYTES = 1 << 18


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small checkpoint is of several."""
    monkeypatch.setenv("HOLDFAST_MIRROR_PIECE_BYTES", str(PIECE_BYTES))


@pytest.fixture(autouse=True)
def _no_uploader_left(tmp_path: Path) -> Iterator[None]:
    yield
    for process in uploaders(tmp_path):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def uploaders(folder: Path) -> list[psutil.Process]:
    """The processes that copy for the run folders below this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            text = " ".join(process.cmdline())
            if "holdfast._store.mirror" in text and str(folder) in text:
                found.append(process)
    return found


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A second folder."""
    return tmp_path / "mirror"


def settings(mirror: object, **more: Any) -> str:
    return json.dumps({"mirror": str(mirror), "checkpoint_every": 10, **more})


def copied_steps(folder: Path) -> list[int]:
    """What the run folder knows to be in the mirror."""
    path = folder / "mirror.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return [each["step"] for each in found.get("checkpoints", [])]


def wait_for_copy(folder: Path, step: int, seconds: float = 60.0) -> None:
    wait_until(lambda: step in copied_steps(folder), seconds, f"step {step} in the mirror")


def push(folder: Path, mirror: Path) -> None:
    """What `holdfast mirror --push` does, without a process for it."""
    by_hand.push(folder, str(mirror), lambda: None, pytest.fail)


def fetch(folder: Path, mirror: Path) -> None:
    by_hand.fetch(folder, str(mirror), None, pytest.fail)


class Bucket:
    """One bucket of the store on this machine."""

    def __init__(self, client: Any, endpoint: str, name: str) -> None:
        self.client = client
        self.endpoint = endpoint
        self.name = name

    @property
    def address(self) -> str:
        return f"s3://{self.name}/run"

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def keys(self, prefix: str = "run/") -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", [])]

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)


@pytest.fixture(scope="session")
def store() -> Iterator[tuple[Any, str]]:
    """A client, and the address of a server that answers as S3 does."""
    pytest.importorskip("s3fs", reason="pip install 'holdfast[s3]'")
    pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    yield client, endpoint
    client.close()
    server.stop()


@pytest.fixture
def bucket(store: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """A new bucket, and an environment in which all processes find it."""
    client, endpoint = store
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    found = Bucket(client, endpoint, f"bucket-{os.getpid()}-{next(_numbers)}")
    client.create_bucket(Bucket=found.name)
    return found


@pytest.fixture
def wire(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """The way to the store, which can be cut."""
    with Wire(bucket.port) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
        yield found


@pytest.fixture
def refusing(bucket: Bucket) -> Iterator[None]:
    """The store looks at credentials, and knows nobody."""
    _allow(bucket, b"0")
    yield
    _allow(bucket, b"1000000000000")


def _allow(bucket: Bucket, count: bytes) -> None:
    url = f"{bucket.endpoint}/moto-api/reset-auth"
    # As a form, which is what it would be by itself, the server would not see it.
    asked = urllib.request.Request(url, count, {"Content-Type": "text/plain"}, method="POST")
    with urllib.request.urlopen(asked) as answer:
        answer.read()


@pytest.fixture
def train(start: Callable[..., Trainer], gate: Path) -> Callable[..., Trainer]:  # noqa: F811  as above
    """Start a training of 1.6 MB of state that copies to a mirror."""

    def begin(folder: Path, mirror: object, *arguments: Any, **more: Any) -> Trainer:
        options = ["--gate", gate, "--size", SIZE, "--settings", settings(mirror, **more)]
        return start(folder, *options, *arguments, script=LIGHT)

    return begin

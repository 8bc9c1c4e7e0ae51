"""No secret is recorded: by its name, by its place, or by its own form."""

from __future__ import annotations

import pytest

from holdfast._environment.secrets import (
    LEFT_OUT,
    is_secret,
    redact_diff,
    redact_text,
    redact_tree,
    redact_variables,
    redact_words,
)
from tests.secrets import KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_kind_of_secret_is_left_in_a_command(kind):
    found = redact_words(["python", "train.py", *kind.words, "--lr", "0.1"])
    assert kind.secret not in " ".join(found.words)
    assert found.words[-2:] == ["--lr", "0.1"]
    assert len(found.words) == len(kind.words) + 4
    assert found.left_out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_kind_of_secret_is_left_in_the_words_of_a_shell(kind):
    text = "cd /data && python train.py " + " ".join(kind.words)
    assert kind.secret not in redact_words(["bash", "-c", text]).words[2]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_kind_of_secret_is_left_in_a_diff(kind):
    lines = [f"+{line}" for line in kind.as_code.splitlines()]
    diff = "\n".join(["@@ -1,2 +1,3 @@", " import torch", *lines, " lr = 0.1", ""])
    found = redact_diff(diff)
    for part in kind.secret.split("\n"):
        assert part not in found
    assert " import torch" in found
    assert " lr = 0.1" in found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_kind_of_secret_is_left_in_a_config(kind):
    config = {"lr": 0.1, "logger": {kind.variable: kind.value, "more": [kind.value_in_place]}}
    found = redact_tree(config)
    assert kind.secret not in repr(found)
    assert found["lr"] == 0.1


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_kind_of_secret_is_left_in_the_variables(kind):
    found, left_out = redact_variables({kind.variable: kind.value, "OMP_NUM_THREADS": "4"})
    assert (found, left_out) == ({"OMP_NUM_THREADS": "4"}, [kind.variable])


HARMLESS = [
    ["--max-tokens", "512"],
    ["--pad-token", "<pad>"],
    ["--tokenizer", "gpt2"],
    ["--sort-key", "loss"],
    ["--monitor-key", "val_loss"],
    ["--num-keys=12"],
    ["--token-file", "/home/me/token"],
    ["--password-file=/run/pw"],
    ["--no-auth", "train.yaml"],
    ["--use-auth-token", "true"],
    ["--key", "0"],
    ["--seed", "1234567890123"],
    ["--data", "s3://bucket/a/b.parquet"],
    ["--registry", "docker://host:5000/image@sha256:abc"],
    ["--model", "meta-llama/Llama-3.1-8B-Instruct"],
    ["--run-name", "a-long-name-of-an-experiment-lr0.001-bs256-seed1-2024"],
    ["--commit", "9f2c41b0" * 5],
    ["optimizer.lr=0.1", "+model.key_dim=64"],
    ["git@example.org:me/repository.git"],
    ["ssh://git@example.org/repository"],
    ["https://example.org/data?split=train"],
    ["-u", "-X", "faulthandler"],
]


@pytest.mark.parametrize("words", HARMLESS, ids=" ".join)
def test_what_is_no_secret_stays(words):
    found = redact_words(words)
    assert (found.words, found.left_out) == (words, [])


def test_what_was_left_out_is_named():
    words = ["train.py", "--api-key", "abc", "--db=x", "--url", "https://me:pw@host/x"]
    found = redact_words(words)
    assert found.words[2] == LEFT_OUT
    assert found.words[3] == "--db=x"
    assert found.left_out == ["--api-key", f"https://{LEFT_OUT}@host/x"]


def test_an_option_without_a_value_takes_no_other_option():
    found = redact_words(["--token", "--lr", "1"])
    assert (found.words, found.left_out) == (["--token", "--lr", "1"], [])


def test_lists_of_folders_are_no_assignments():
    path = "/opt/token:/home/me/key:/usr/bin"
    assert redact_variables({"PATH": path}) == ({"PATH": path}, [])


def test_the_working_folder_is_no_password():
    assert not is_secret("PWD")
    assert is_secret("MYSQL_PWD")


def test_a_private_key_is_left_out_of_a_diff_as_a_whole():
    lines = ["+-----BEGIN RSA PRIVATE KEY-----", "+abc", "+def", "+-----END RSA PRIVATE KEY-----"]
    assert redact_diff("\n".join([*lines, " x = 1", ""])) == f"+{LEFT_OUT}\n" * 4 + " x = 1\n"


def test_a_secret_on_the_line_after_its_name_is_left_out():
    found = redact_diff('+password = (\n+    "hunter2"\n+)\n+x = 1\n')
    assert "hunter2" not in found
    assert "+x = 1" in found


def test_a_text_without_secrets_is_as_it_was():
    text = "for step in range(10):\n    loss = model(batch)  # tokens: 512\n"
    assert redact_text(text) == text


def test_a_long_text_takes_no_long_time():
    # Every pattern is linear: this would take minutes otherwise, and the test has a timeout.
    for text in ("a" * 90_000, "a:" * 30_000, "key=" * 20_000, "://" * 20_000, "--a " * 20_000):
        redact_text(text)

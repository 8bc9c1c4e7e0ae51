"""Thirty kinds of secrets, as people give them to a training; none of them is real."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind: its words in a command, and the part that must not be recorded."""

    name: str
    variable: str
    words: tuple[str, ...]
    secret: str
    in_place: str = ""  # the value with what stands around it, if that shows that it is secret

    @property
    def value(self) -> str:
        return self.in_place or self.secret

    @property
    def value_in_place(self) -> str:
        """A text that shows by itself that it is secret."""
        return self.in_place or f"{self.variable}={self.secret}"

    @property
    def as_code(self) -> str:
        if "\n" in self.secret:
            return f'{self.variable} = """{self.secret}"""'
        return f"{self.variable} = {self.value!r}"


def _by_name(name: str, variable: str, option: str, secret: str, *, joined: bool = False) -> Kind:
    words = (f"{option}={secret}",) if joined else (option, secret)
    return Kind(name, variable, words, secret)


def _by_form(name: str, variable: str, option: str, secret: str) -> Kind:
    return Kind(name, variable, (option, secret), secret, secret)


_RANDOM = "q7Zr2Lw9Xk4Tn8Vb3Jd6Hs1Pf5Gm0YcQ"
KINDS = [
    _by_name("password", "DB_PASSWORD", "--password", "hunter2"),
    _by_name("password joined", "PGPASSWORD", "--db-password", "tr0ub4dor", joined=True),
    _by_name("passphrase", "SSH_PASSPHRASE", "--passphrase", "correct-horse"),
    _by_name("passwd", "MYSQL_PASSWD", "--passwd", "letmein99", joined=True),
    _by_name("api key", "WANDB_API_KEY", "--api-key", "0f1e2d3c4b5a69788796"),
    _by_name("api key joined", "COMET_API_KEY", "--api_key", "comet-41x", joined=True),
    _by_name("token", "HF_TOKEN", "--token", "abcd-efgh"),
    _by_name("token of a service", "HUGGINGFACE_TOKEN", "--hf-token", "wxyz-1234", joined=True),
    _by_name("secret", "CLIENT_SECRET", "--client-secret", "s3cr3tvalue"),
    _by_name("access key", "AWS_SECRET_ACCESS_KEY", "--aws-secret-access-key", "wJalr/bPx+Rf"),
    _by_name("credentials", "MY_CREDENTIALS", "--credentials", "user=me,pw=x9x9"),
    _by_name("auth", "NEPTUNE_AUTH", "--auth", "me-and-x8x8"),
    _by_name("jwt by name", "SLURM_JWT", "--jwt", "opaque-jwt-1"),
    _by_name("signature", "SAS_SIGNATURE", "--signature", "sv2024sig"),
    Kind("hydra", "LOGGER_API_KEY", ("logger.api_key=hydra-77",), "hydra-77"),
    Kind("hydra added", "LOGGER_TOKEN", ("+logger.token=hydra-88",), "hydra-88"),
    Kind(
        *("json", "JSON_CONFIG", ("--config", '{"lr": 1, "api_key": "json-99x"}'), "json-99x"),
        in_place='{"lr": 1, "api_key": "json-99x"}',
    ),
    Kind(
        *("address with password", "DATABASE_URL", ("--db", "postgres://me:pg-pw-1@host/db")),
        *("pg-pw-1", "postgres://me:pg-pw-1@host/db"),
    ),
    Kind(
        *("address with token", "REPO_URL", ("--repo", "https://tok-abc-1@example.org/r.git")),
        *("tok-abc-1", "https://tok-abc-1@example.org/r.git"),
    ),
    Kind(
        *("token in a query", "DATA_URL", ("--data", "https://example.org/d?a=1&token=qry-5x")),
        *("qry-5x", "https://example.org/d?a=1&token=qry-5x"),
    ),
    Kind(
        *("signed address", "BLOB_URL", ("--blob", "https://example.org/b?sv=1&sig=Zm9v%2FYmFy")),
        *("Zm9v%2FYmFy", "https://example.org/b?sv=1&sig=Zm9v%2FYmFy"),
    ),
    Kind(
        *("bearer", "HEADER", ("--header", "Authorization: Bearer abc.def-ghi")),
        *("abc.def-ghi", "Authorization: Bearer abc.def-ghi"),
    ),
    Kind(
        *("header with a key", "HEADERS", ("--header", "X-Api-Key: hdr-key-1")),
        *("hdr-key-1", "X-Api-Key: hdr-key-1"),
    ),
    Kind(
        *("webhook", "ALERT_URL", ("--alert", "https://hooks.slack.com/services/T0/B0/Xyz9")),
        *("T0/B0/Xyz9", "https://hooks.slack.com/services/T0/B0/Xyz9"),
    ),
    _by_form("git host", "ANY_1", "--x1", "ghp_0123456789abcdefABCDEF0123456789abcd"),
    _by_form("model hub", "ANY_2", "--x2", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"),
    _by_form("model service", "ANY_3", "--x3", "sk-proj-0123456789abcdefghij"),
    _by_form("cloud key id", "ANY_4", "--x4", "AKIAIOSFODNN7EXAMPLE"),
    _by_form("chat", "ANY_5", "--x5", "xoxb-123456789012-abcdefGHIJKL"),
    _by_form("json web token", "ANY_6", "--x6", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl"),
    _by_form("random characters", "ANY_7", "--x7", _RANDOM),
    _by_form(
        *("private key", "ANY_8", "--x8"),
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEF\n-----END PRIVATE KEY-----",
    ),
]
assert len(KINDS) >= 30

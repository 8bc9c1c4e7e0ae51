"""What is wrong with a mirror, in a sentence."""

from __future__ import annotations

import errno

from holdfast._mirror.store import MissingPlace

# By what the libraries of stores call it: to import them only for their errors would be dear.
_NO_CREDENTIALS = ("NoCredentials", "CredentialRetrieval", "DefaultCredentials")
_REFUSED = (
    *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"),
    *("Forbidden", "InvalidToken", "AuthFailure"),
)
_UNREACHABLE = ("EndpointConnection", "ConnectTimeout", "ReadTimeout", "ConnectionError", "Timeout")
_MOST = 160
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def describe_trouble(address: str, error: BaseException) -> str:
    """Why a store cannot be used just now, whatever its library has raised."""
    return f"{address}: {why(error)}"


def why(error: BaseException) -> str:
    """The same without the address; alike for what is the same trouble."""
    texts = " ".join(f"{type(each).__name__} {each}" for each in _chain(error))
    if any(word in texts for word in _NO_CREDENTIALS):
        return "there are no credentials for it here"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return "there is no room left in it"
    if isinstance(error, MissingPlace):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        # Without the name, which is another one at each try.
        return f"{type(error).__name__}: {error.strerror}"
    if isinstance(error, PermissionError) or any(word in texts for word in _REFUSED):
        return f"the credentials are refused ({_first_line(error)})"
    if "NoSuchBucket" in texts:
        return "there is no such bucket"
    if any(word in texts for word in _UNREACHABLE):
        return "it cannot be reached"
    return f"{type(error).__name__}: {_first_line(error)}"


def _chain(error: BaseException) -> list[BaseException]:
    found = [error]
    while len(found) < 8 and (cause := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(cause)
    return found


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"

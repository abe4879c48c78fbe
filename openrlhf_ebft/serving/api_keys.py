"""API keys: read once, kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from openrlhf_ebft.config.errors import UserError
from openrlhf_ebft.config.serving import HTTPConfig
from openrlhf_ebft.serving.errors import RequestError

_SHORTEST_KEY = 8  # characters


def read_key_digests(http: HTTPConfig) -> tuple[bytes, ...]:
    """SHA-256 digests of the configured API keys; empty when none are configured. No message ever holds a key.

    Raises:
        UserError: the variable or file is missing, holds no key, or holds one that cannot be sent or is too short.
    """
    keys: list[str] = []
    if http.api_keys_env is not None:
        value = os.environ.get(http.api_keys_env)
        if not value:
            raise UserError(f"http.api_keys_env: the environment variable {http.api_keys_env} is not set or empty")
        keys += _checked(value.split(","), f"environment variable {http.api_keys_env}")
    if http.api_keys_file is not None:
        try:
            lines = Path(http.api_keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"http.api_keys_file = {http.api_keys_file}: cannot be read: {error}") from None
        keys += _checked(lines, http.api_keys_file)
    return tuple(_digest(key.encode("ascii")) for key in keys)


def require_key(authorization: Sequence[bytes], digests: Sequence[bytes]) -> None:
    """Checks the `Authorization` header lines of a request against the digests; none configured lets all pass.

    Raises:
        RequestError: 401 when the header is missing, repeated or malformed, or its key is unknown.
    """
    if not digests:
        return
    if len(authorization) != 1:
        fault = "missing" if not authorization else "given more than once"
        raise RequestError(f"API key {fault}: send `Authorization: Bearer KEY`", status=HTTPStatus.UNAUTHORIZED)
    scheme, _, key = authorization[0].partition(b" ")
    given = _digest(key.strip())
    # Every digest is compared, so the time tells nothing about which one agrees.
    known = [hmac.compare_digest(given, digest) for digest in digests]
    if scheme.lower() != b"bearer" or not any(known):
        raise RequestError("wrong API key: send `Authorization: Bearer KEY`", status=HTTPStatus.UNAUTHORIZED)


def _checked(lines: Sequence[str], source: str) -> list[str]:
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise UserError(f"{source}: holds no API key")
    for number, key in enumerate(keys, 1):
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise UserError(
                f"{source}: key {number} must be at least {_SHORTEST_KEY} printable ASCII characters without spaces"
            )
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

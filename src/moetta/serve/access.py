"""Who may call: hosts, origins, API keys and the admin token."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from moetta.serve.refusal import Refusal
from moetta.serve.settings import Settings


def check_host(headers: Mapping[str, str], settings: Settings) -> None:
    """Refuse calls under a foreign name, and calls that other web sites' pages make.

    Without this, any page open in a browser on this machine could send images to be learnt from,
    directly or through a name that it lets resolve to this address.

    Raises:
        Refusal: 421 for a host that is not allowed, 403 for another origin.
    """
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if settings.hosts is not None and name not in settings.hosts:
        raise Refusal(
            421,
            "this host name is not served here; start the service with --allowed-hosts NAME",
        )
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        raise Refusal(403, "pages of other origins may not call this service")


def check_key(headers: Mapping[str, str], settings: Settings) -> None:
    """Refuse clients without an API key, where keys are set.

    Raises:
        Refusal: 401.
    """
    if not settings.api_keys:
        return
    given = headers.get("x-api-key", "").encode()
    # Every key is compared, so that the time does not tell which one was nearly right.
    if not sum(hmac.compare_digest(given, key.encode()) for key in settings.api_keys):
        raise Refusal(401, "an API key is needed; send it as X-API-Key")


def check_admin(headers: Mapping[str, str], settings: Settings) -> None:
    """Refuse everyone but the admin.

    Raises:
        Refusal: 403 if admin calls are disabled, 401 if the token is missing or wrong.
    """
    if settings.admin_token is None:
        raise Refusal(
            403, "admin calls are disabled; start the service with an admin token to enable them"
        )
    kind, _, given = headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), settings.admin_token.encode())
    if kind.lower() != "bearer" or not right:
        raise Refusal(401, "the admin token is missing or wrong; send Authorization: Bearer TOKEN")

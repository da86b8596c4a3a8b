"""Asks a gateway of this cluster whether a token has passed through it, and if not, why."""

import json
import ssl
import urllib.error
import urllib.request
from typing import NamedTuple

MODEL_FAILS = "model_fails"  # the code of a gateway's answer where waiting does not help
_TIMEOUT_S = 2.0


class NotReady(NamedTuple):
    """Why there is no token yet, as the gateway says it."""

    reason: str
    is_lasting: bool = False  # the model itself fails at every try


def ask_ready(url: str) -> NotReady | None:
    # Its own gateway, which it asks by an address that the certificate need not name; nothing secret is sent.
    unverified_context = ssl._create_unverified_context() if url.startswith("https:") else None  # noqa: S323
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=_TIMEOUT_S, context=unverified_context):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        return _as_said(error)
    except OSError as error:
        return NotReady(f"the gateway does not answer ({error})")


def _as_said(answer: urllib.error.HTTPError) -> NotReady:
    try:
        said = json.loads(answer.read())["error"]
        return NotReady(str(said["message"]).removeprefix("Not ready: ").rstrip("."), said["code"] == MODEL_FAILS)
    except (OSError, ValueError, LookupError, TypeError):
        return NotReady(f"the gateway answers {answer.code}")

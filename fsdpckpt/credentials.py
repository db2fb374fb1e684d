"""Passwords and tokens in the texts that the program shows or records.

A location may carry what a store knows its user by: ``s3://key:secret@bucket``, ``https://...?X-Amz-Signature=...``,
the SAS token of an Azure container; a token of the Hugging Face Hub may stand anywhere. The program opens the location
with them and shows them nowhere. ``flags.Message`` (errors, notes, problems, reports), ``cli.output`` and what is
recorded beside a checkpoint have each location as ``without_credentials`` shows it.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# A URL stands in a sentence, in quotes, in JSON (whose escapes have a backslash) or in HTML.
_WEB_USER = re.compile(r"(https?://)[^\s'\"<>\\/]*@", re.IGNORECASE)
# With a password, since abfs://container@account names no user. A secret key may have slashes; what is a number up to
# the first one is a port.
_USER = re.compile(r"(?<=://)[^\s'\"<>\\@:/\[]*:(?!\d+(?:/|$))[^\s'\"<>\\@]*@(?:[^\s'\"<>\\@/]*@)*")
_QUERY = re.compile(r"([A-Za-z][\w+.-]*)(://[^\s'\"<>\\?]*)\?([^\s'\"<>\\]*[^\s'\"<>\\,;:.)])")
_SETTING = re.compile(r"[^/=&]+=")  # else the question mark is a pattern's, or one of the name of an object
_VERSION = re.compile(r"(?:versionId|generation|snapshot|revision)=[^&]*")  # of an object: no secret
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def without_credentials(text: str) -> str:
    """``text`` with ``***`` for what opens the locations in it: users and passwords, queries, tokens of the Hub.

    Every text that is shown comes here, most without a location: it has to be quick for those.
    """
    if "://" in text:
        text = _USER.sub(f"{HIDDEN}@", text)
        text = _WEB_USER.sub(rf"\1{HIDDEN}@", text)
        text = _QUERY.sub(_with_hidden_query, text)
    if "hf_" in text:
        text = _HUB_TOKEN.sub(HIDDEN, text)
    return text


def shown_name(location: str) -> str:
    """The last part of ``location`` as it is shown: a query ends the location, and its first part is not a name."""
    return without_credentials(location).rstrip("/").rpartition("/")[2]


def _with_hidden_query(url: re.Match[str]) -> str:
    scheme, path, query = url.groups()
    opens = scheme.lower() in ("http", "https") or _SETTING.match(query) is not None
    if not opens or all(map(_VERSION.fullmatch, query.split("&"))):
        return url[0]
    return f"{scheme}{path}?{HIDDEN}"


def shown_cause(error: BaseException) -> BaseException | None:
    """``error`` as the cause of another, for ``raise ... from``: None if a traceback of it would show credentials."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if without_credentials(text) != text:
            return None
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return error

"""Passwords and tokens in the texts that the program shows or records.

A location may carry what a store knows its user by: ``s3://key:secret@bucket``, ``https://...?X-Amz-Signature=...``,
the SAS token of an Azure container; a token of the Hugging Face Hub may stand anywhere. The program opens the location
with them and shows them nowhere. ``flags.Message`` (errors, notes, problems, reports), ``cli.output`` and what is
recorded beside a checkpoint have each location as ``without_credentials`` shows it.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# A URL stands in a sentence, in quotes, in JSON (whose escapes have a backslash) or in HTML. No expression looks
# further than a URL is long: a name in a checkpoint may be of any length.
_WEB_USER = re.compile(r"(https?://)[^\s'\"<>\\/]{0,4096}@", re.IGNORECASE)
# With a password, since abfs://container@account names no user. A secret key may have slashes.
_USER = re.compile(r"(?<=://)[^\s'\"<>\\@:/\[]{0,1024}:[^\s'\"<>\\@]{0,1024}@(?:[^\s'\"<>\\@/]{0,1024}@)*")
_PORT = re.compile(r"[^:]*:\d{1,5}/")
_WITH_PORTS = ("http", "https", "hdfs", "webhdfs", "ftp", "sftp", "ssh", "smb")  # a bucket has none
_QUERY = re.compile(r"(://[^\s'\"<>\\?]{0,4096})\?([^\s'\"<>\\]*[^\s'\"<>\\,;:.)])")
_SETTING = re.compile(r"[^/=&]+=")  # else the question mark is a pattern's, or one of the name of an object
_VERSION = re.compile(r"(?:versionId|generation|snapshot|revision)=[^&]*")  # of an object: no secret
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def without_credentials(text: str) -> str:
    """``text`` with ``***`` for what opens the locations in it: users and passwords, queries, tokens of the Hub.

    Every text that is shown comes here, most without a location: it has to be quick for those.
    """
    if "://" in text:
        if "@" in text:
            text = _USER.sub(_with_hidden_user, text)
            text = _WEB_USER.sub(rf"\1{HIDDEN}@", text)
        if "?" in text:
            text = _QUERY.sub(_with_hidden_query, text)
    if "hf_" in text:
        text = _HUB_TOKEN.sub(HIDDEN, text)
    return text


def hidden_in(text: str, location: str) -> str:
    """What a store's package says of ``location``, without what opens it.

    Parts of the location stand alone in ``text``: s3fs takes ``KEY:secret@bucket`` for the name of a bucket.
    """
    users = [user[0] for user in _USER.finditer(location) if _with_hidden_user(user) != user[0]]
    users += [user[0].removeprefix(user[1]) for user in _WEB_USER.finditer(location)]
    for user in users:
        parts = (part for part in re.split("[:/@]", user) if len(part) > 2)  # shorter ones are in any word
        for secret in (user, user[:-1], *parts):
            text = text.replace(secret, HIDDEN)
    return without_credentials(text)


def shown_name(location: str) -> str:
    """The last part of ``location`` as it is shown: a query ends the location, and its first part is not a name."""
    return without_credentials(location).rstrip("/").rpartition("/")[2]


def _scheme_before(url: re.Match[str]) -> str:
    """The letters before the ``://`` at or before ``url``."""
    begin = url.start() - (0 if url[0].startswith("://") else len("://"))
    return re.split(r"[^a-z]", url.string[max(begin - 8, 0) : begin].lower())[-1]


def _with_hidden_user(user: re.Match[str]) -> str:
    if _PORT.match(user[0]) and _scheme_before(user) in _WITH_PORTS:
        return user[0]  # of a path with an @ in it
    return f"{HIDDEN}@"


def _with_hidden_query(url: re.Match[str]) -> str:
    path, query = url.groups()
    opens = _scheme_before(url) in ("http", "https") or _SETTING.match(query) is not None
    if not opens or all(map(_VERSION.fullmatch, query.split("&"))):
        return url[0]
    return f"{path}?{HIDDEN}"


def shown_cause(error: BaseException) -> BaseException | None:
    """``error`` as the cause of another, for ``raise ... from``: None if a traceback of it would show credentials."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if without_credentials(text) != text:
            return None
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return error

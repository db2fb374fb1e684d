"""Passwords and tokens in the texts that the program shows or records.

A location may carry what a store knows its user by: ``s3://key:secret@bucket``, ``https://...?X-Amz-Signature=...``,
the SAS token of an Azure container; a token of the Hugging Face Hub may stand anywhere. The program opens the location
with them and shows them nowhere. ``flags.Message`` (errors, notes, problems, reports), ``cli.output`` and what is
recorded beside a checkpoint have each location as ``without_credentials`` shows it.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# How a URL begins: also one that was typed without its slashes, or with too many, where the kind of store is known.
_BEGIN = r"(?:(?<![\w.+-])(?P<scheme>https?|s3a?|gc?s|azure|az|abfss?|adl|hf|s?ftp|ssh|smb|(?:web)?hdfs):/*+|://)"
# A URL stands in a sentence, in quotes, in JSON (whose escapes have a backslash) or in HTML. No expression looks
# further than a URL is long: a name in a checkpoint may be of any length.
_USER_ALONE = re.compile(r"((?<![\w.+-])(?:https?|s3a?|gc?s):/*)[^\s'\"<>\\/]{1,4096}@", re.IGNORECASE)
# With a password, since abfs://container@account names no user. A secret key may have slashes.
_USER = re.compile(
    _BEGIN + r"(?P<user>[^\s'\"<>\\@:/\[]{0,1024}+:[^\s'\"<>\\@]{0,1024}+@(?:[^\s'\"<>\\@/]{0,1024}@)*)", re.IGNORECASE
)
_PORT = re.compile(r"[^:]*:\d{1,5}/")
_WITH_PORTS = ("http", "https", "hdfs", "webhdfs", "ftp", "sftp", "ssh", "smb")  # a bucket has none
_QUERY = re.compile(
    _BEGIN + r"(?P<path>[^\s'\"<>\\?#]{0,2048}+)(?P<mark>[?#])(?P<query>[^\s'\"<>\\]*[^\s'\"<>\\,;:.)])", re.IGNORECASE
)
_SETTING = re.compile(r"[^/=&]+=")  # else the question mark is a pattern's, or one of the name of an object
_VERSION = re.compile(r"(?:versionId|generation|snapshot|revision)=[^&]*")  # of an object: no secret
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


def without_credentials(text: str) -> str:
    """``text`` with ``***`` for what opens the locations in it: users and passwords, queries and
    fragments, tokens of the Hub.

    Every text that is shown comes here, most without a location: it has to be quick for those.
    """
    if ":" in text:
        if "@" in text:
            text = _USER.sub(_with_hidden_user, text)
            text = _USER_ALONE.sub(rf"\1{HIDDEN}@", text)
        if "?" in text or "#" in text:
            text = _QUERY.sub(_with_hidden_query, text)
    if "hf_" in text:
        text = _HUB_TOKEN.sub(HIDDEN, text)
    return text


def hidden_in(text: str, location: str) -> str:
    """What a store's package says of ``location``, without what opens it.

    Parts of the location stand alone in ``text``: s3fs takes ``KEY:secret@bucket`` for the name of a bucket.
    """
    users = [user["user"] for user in _USER.finditer(location) if _with_hidden_user(user) != user[0]]
    users += [user[0].removeprefix(user[1]) for user in _USER_ALONE.finditer(location)]
    for user in users:
        parts = (part for part in re.split("[:/@]", user) if len(part) > 2)  # shorter ones are in any word
        for secret in (user, user[:-1], *parts):
            text = text.replace(secret, HIDDEN)
    return without_credentials(text)


def shown_name(location: str) -> str:
    """The last part of ``location`` as it is shown: a query ends the location, and its first part is not a name."""
    return without_credentials(location).rstrip("/").rpartition("/")[2]


def _with_hidden_user(url: re.Match[str]) -> str:
    if _PORT.match(url["user"]) and (url["scheme"] or "").lower() in _WITH_PORTS:
        return url[0]  # of a path with an @ in it
    return f"{url[0].removesuffix(url['user'])}{HIDDEN}@"


def _with_hidden_query(url: re.Match[str]) -> str:
    query = url["query"]
    opens = (url["scheme"] or "").lower() in ("http", "https") or _SETTING.match(query) is not None
    if not opens or all(map(_VERSION.fullmatch, query.split("&"))):
        return url[0]
    return f"{url[0].removesuffix(query)}{HIDDEN}"


def shown_cause(error: BaseException) -> BaseException | None:
    """``error`` as the cause of another, for ``raise ... from``: None if a traceback of it would show credentials."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if without_credentials(text) != text:
            return None
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return error

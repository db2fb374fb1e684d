"""What opens a location is in none of the texts that the program shows or records."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from fsdpckpt import flags
from fsdpckpt.converters.output.spool import Spool
from fsdpckpt.credentials import shown_cause, shown_name, without_credentials
from fsdpckpt.errors import FsdpckptError, Leftover, SourceError, attach_leftover
from fsdpckpt.flags import Message
from fsdpckpt.ir.checkpoint import Note, Problem
from fsdpckpt.text import truncate
from tests.cli.conftest import Run, run

__all__ = ["run"]

_OF_THE_HUB = "hf_" + "aB3" * 12

# A location, and what is shown of it.
LOCATIONS = {
    "https://someone:hidden@host/run/step-3": "https://***@host/run/step-3",
    "https://hidden@host:8443/run": "https://***@host:8443/run",
    "HTTPS://hidden@host/run": "HTTPS://***@host/run",
    "https://host/full.pt?X-Amz-Signature=hidden&X-Amz-Date=hidden": "https://host/full.pt?***",
    "https://host/full.pt?hidden": "https://host/full.pt?***",
    "https://account.blob.core.windows.net/c/x.pt?sv=2024-01-01&sig=hidden%2B%3D": (
        "https://account.blob.core.windows.net/c/x.pt?***"
    ),
    "s3://KEY:hidden@bucket/run": "s3://***@bucket/run",
    "s3://KEY:hidden/with+slashes/hidden@bucket/run": "s3://***@bucket/run",
    "s3://KEY:12/hidden@bucket/run": "s3://***@bucket/run",
    "s3://KEY:hid@den@bucket/run": "s3://***@bucket/run",
    "s3://:hidden@bucket/run": "s3://***@bucket/run",
    "az://container/x.pt?sig=hidden": "az://container/x.pt?***",
    "simplecache::s3://KEY:hidden@bucket/run": "simplecache::s3://***@bucket/run",
    "https://host/full.pt#hidden": "https://host/full.pt#***",
    "https://host/full.pt#token=hidden?more=hidden": "https://host/full.pt#***",
    "https://host/full.pt?a=hidden#hidden": "https://host/full.pt?***",
    "s3://bucket/x.pt#key=hidden": "s3://bucket/x.pt#***",
    "s3://hidden@bucket/run": "s3://***@bucket/run",
    # typed without slashes, or with too many: it is no URL, and is shown in the error that says so
    "https:someone:hidden@host/x": "https:***@host/x",
    "https:/someone:hidden@host/x": "https:/***@host/x",
    "https:///someone:hidden@host/x": "https:///***@host/x",
    "https:hidden@host/x": "https:***@host/x",
    "https:host/x?hidden": "https:host/x?***",
    "s3:KEY:hidden@bucket": "s3:***@bucket",
    "S3:/KEY:hid/hidden@bucket/x?sig=hidden": "S3:/***@bucket/x?***",
    f"hf://{_OF_THE_HUB}@user/repo": "hf://***@user/repo",
}
PLAIN = (
    "s3://bucket/run/step-3",
    "s3://bucket/step-?/model",
    "s3://bucket/x.pt?versionId=3a.Zq",
    "abfs://container@account.dfs.core.windows.net/run",
    "hf://user/repo@main/x.safetensors",
    "http://host:8080/run@5/x.pt",
    "http://[::1]:8080/run@5",
    "hdfs://node:8020/run@5/x.pt",
    "gs://bucket/lr=0.1/step?/beta=2",
    "runs/what?lr=3",
    "s3://bucket/run#3/x.pt",
    "hf:user@main",
    "layers:a:b@c#d=3",
    "my-https:a:b@c",
    "file:///runs/a:b@c",
    "layers.0.hf_attention.weight",
)


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_location_is_shown_without_what_opens_it(location: str, tmp_path: Path) -> None:
    """In any text, in JSON, and in the names of directories that uploads are prepared in."""
    shown = LOCATIONS[location]
    assert without_credentials(location) == shown == without_credentials(shown)
    for around in ("{}", "cannot read {}: no answer", "see '{}', then", '<a href="{}">', "{}, or {}"):
        assert without_credentials(around.format(location, location)) == around.format(shown, shown)
    document = json.dumps({"source": location, "said": f'"{location}"\n', "next": 1}, ensure_ascii=False)
    assert json.loads(without_credentials(document)) == {"source": shown, "said": f'"{shown}"\n', "next": 1}
    spool = Spool.of(location, str(tmp_path))
    assert "hidden" not in spool.path and _OF_THE_HUB not in spool.path
    assert Path(spool.path).relative_to(spool.root).parts[1:] == (shown_name(location),)


@pytest.mark.parametrize("location", PLAIN)
def test_a_location_without_credentials_is_shown_as_it_is(location: str) -> None:
    assert without_credentials(location) == location


@pytest.mark.parametrize("location", LOCATIONS)
def test_no_error_note_or_problem_shows_more(location: str) -> None:
    error = SourceError(
        f"{location} cannot be read",
        details=[f"{location}: nothing there"],
        why=f"{location} is gone",
        next_step=f"see {flags.reference(location)}; {flags.command('inspect', location)}",
        file=location,
        files=[location],
        found=location,
        expected=truncate(location),
    )
    attach_leftover(error, Leftover(f"parts at {location}", f"continues {location}"))
    texts = [str(error), repr(error), str(error.args), error.text, str(error.describe()), str(error.to_json())]
    again = SourceError.from_json(error.to_json())
    texts += [str(again), repr(again), error.leftover.what if error.leftover else ""]
    texts += [Note("read", f"{location} was read").message, Problem("damage", f"{location} is damaged").message]
    texts += [str(Message(f"{flags.parameters(location)}")), flags.in_python(f"add {flags.parameters(location)}")]
    for text in texts:
        assert "hidden" not in text and _OF_THE_HUB not in text and "***" in text
    assert error.file == location  # the program goes on with it


@pytest.mark.parametrize("deep", [False, True])
def test_a_traceback_has_no_cause_that_shows_credentials(deep: bool) -> None:
    cause = OSError("404, url='https://host/x?sig=hidden'")
    if deep:
        above = OSError("no answer")
        above.__cause__ = cause
        cause = above
    assert shown_cause(cause) is None
    plain = OSError("404, url='https://host/x'")
    assert shown_cause(plain) is plain


def test_a_text_that_is_cut_short_is_not_cut_within_a_password() -> None:
    error = FsdpckptError(truncate(f"s3://{'K' * 60}:hidden{'x' * 60}@bucket"))
    assert "hidden" not in str(error)


@pytest.mark.parametrize("text", ["https://a@", "a://b:c", "x://?a"])
def test_long_texts_take_no_longer_than_their_length(text: str) -> None:
    """A name in a checkpoint may be as long as its author likes."""
    began = time.process_time()
    without_credentials(text * 20_000 + " s3://bucket/x?")
    assert time.process_time() - began < 3.0


@pytest.mark.parametrize(
    "url", ["https:u:SeCrEt@h/x", "https:/u:SeCrEt@h/x.pt", "s3:///KEY:Se/SeCrEt@b", "foo://h/x?key=SeCrEt"]
)
def test_no_command_shows_the_credentials_of_what_is_no_url(
    url: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slash that was forgotten, or a store that fsdpckpt does not know: refused, with none of its secrets."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3, 3)}, "full.pt")
    convert = ("convert", "full.pt", "out.pt", "--to", "full")
    commands = [("inspect", url), ("verify", url), ("diff", "full.pt", url), ("diff", url, "full.pt")]
    commands += [("units", "--from", url), ("convert", url, "out.pt"), ("convert", "full.pt", url, "--to", "full")]
    commands += [("convert", url, "out", "--each", "step-*"), ("convert", "full.pt", url, "--each", "step-*")]
    commands += [(*convert, option, url) for option in ("--reference", "--parameters", "--units", "--like", "--map")]
    for command in commands:
        for form in ((), ("--json",)):
            done = run(*command, *form)
            assert "SeCrEt" not in done.out + done.err, (command, done.out, done.err)
            assert done.code, command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full.pt"]

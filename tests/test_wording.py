"""Errors in Python name keywords; on the command line the same errors name options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fsdpckpt
from fsdpckpt.cli.errors import error_text
from fsdpckpt.command_options import in_python
from fsdpckpt.errors import FsdpckptError, TargetExistsError
from fsdpckpt.option_fields import Option, options_of
from fsdpckpt.options import ConvertOptions, LaunchOptions
from tests.conftest import AS_PYTHON_SHOWS


@pytest.mark.parametrize(
    ("written", "python"),
    [
        (
            "add --units FILE, or --reference PATH of a full checkpoint",
            "add units=FILE, or reference=PATH of a full checkpoint",
        ),
        ("--world-size 3 is more than it has", "world_size=3 is more than it has"),
        ("--world-size is a number of ranks", "world_size is a number of ranks"),
        ("add --use-orig-params or --no-use-orig-params", "add use_orig_params=True or use_orig_params=False"),
        ("add --unit GLOB (repeatable) for example --unit 'layers.*'", "add unit=GLOB for example unit='layers.*'"),
        ("did you mean --to full?", "did you mean to='full'?"),
        ("add --mesh dp=4,tp=2, or another", "add mesh='dp=4,tp=2', or another"),
        ("--mesh 8 or --mesh NAME=SIZE,... --like PATH", "mesh='8' or mesh=NAME=SIZE,... like=PATH"),
        ("drop --to and --container", "drop to and container"),
        ("--no-weight-decay standard, if", "no_weight_decay='standard', if"),
        ("--to full, --to sharded", "to='full', to='sharded'"),
        ("--rename OLD=NEW, or --rename encoder=backbone.", "rename={OLD: NEW}, or rename={'encoder': 'backbone'}."),
        ("--max-memory 1MiB or more; --threads 4", "max_memory='1MiB' or more; threads=4"),
        ("--units /runs/units.json does not exist", "units='/runs/units.json' does not exist"),
        ("won't replace it without --overwrite.", "won't replace it without overwrite=True."),
        ("the same command with --resume continues", "the same command with resume=True continues"),
        (
            "fsdpckpt convert a b --key-type name  # then compare",
            "fsdpckpt convert a b --key-type name  # then compare",
        ),
        (
            "run `fsdpckpt units --from a --unit x`, then add --units FILE",
            "run `fsdpckpt units --from a --unit x`, then add units=FILE",
        ),
        ("the output of `fsdpckpt --version`", "the output of `fsdpckpt --version`"),
    ],
)
def test_options_become_keywords(written: str, python: str) -> None:
    assert in_python(written) == python


@pytest.mark.parametrize(
    "option", [*options_of(ConvertOptions), *options_of(LaunchOptions)], ids=lambda option: option.name
)
def test_every_option_has_its_keyword(option: Option) -> None:
    flag, name = option.flag, option.name
    assert in_python(f"add {flag}, then").startswith((f"add {name}, then", f"add {name}=True, then"))
    if option.choices:
        assert in_python(f"add {flag} {option.choices[-1]}.") == f"add {name}={option.choices[-1]!r}."


def test_the_api_words_errors_for_python() -> None:
    code = (
        "import fsdpckpt\n"
        "try: fsdpckpt.convert('x.pt', 'y', verify='none', max_memory='lots')\n"
        "except fsdpckpt.errors.UsageError as error: print(error.__cause__, str(error).splitlines()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None max_memory: 'lots' is not a size\n"


def test_a_caller_of_python_reads_keywords_and_a_terminal_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FsdpckptError, "__str__", AS_PYTHON_SHOWS)
    target = tmp_path / "out.pt"
    target.write_bytes(b"something")
    source = Path(__file__).parent / "golden" / "torch-2.4" / "f2_default" / "ckpt"
    with pytest.raises(TargetExistsError) as raised:
        fsdpckpt.convert(source, target)
    assert "overwrite=True" in str(raised.value) and "--overwrite" not in str(raised.value)
    assert "--overwrite" in error_text(raised.value) and "overwrite=True" not in error_text(raised.value)
    assert TargetExistsError.from_json(raised.value.to_json()).text == raised.value.text

"""``verify --junit``: what CI shows as tests."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from fsdpckpt.cli.junit import CHECKS, FINITE
from tests.cli.conftest import Run


def cases(path: Path) -> dict[str, str]:
    """Each test of the file, and how it ended; the totals must be those of its tests."""
    root = ET.parse(path).getroot()
    (suite,) = root
    found: dict[str, str] = {}
    for case in suite.iter("testcase"):
        found[str(case.get("name"))] = next((each.tag for each in case), "passed")
    ends = list(found.values())
    for element in (root, suite):
        assert (element.tag, int(str(element.get("tests")))) in (("testsuites", len(ends)), ("testsuite", len(ends)))
        assert int(str(element.get("failures"))) == ends.count("failure")
        assert int(str(element.get("errors"))) == ends.count("error")
    return found


def test_a_whole_checkpoint_passes_every_test(run: Run, saved: Path, tmp_path: Path) -> None:
    assert run("verify", saved, "--junit", tmp_path / "a.xml").code == 0
    assert cases(tmp_path / "a.xml") == {"readable": "passed", **dict.fromkeys(CHECKS, "passed"), FINITE: "skipped"}
    assert run("verify", saved, "--junit", tmp_path / "a.xml", "--finite").code == 0  # the earlier file is replaced
    assert cases(tmp_path / "a.xml") == {"readable": "passed", **dict.fromkeys(CHECKS, "passed")}


def test_each_problem_fails_the_test_that_finds_it(run: Run, tmp_path: Path) -> None:
    torch.save({"model": {"w<&>": torch.tensor([1.0, float("nan")])}}, tmp_path / "nan.pt")
    data = bytearray((tmp_path / "nan.pt").read_bytes())
    assert run("verify", tmp_path / "nan.pt", "--finite", "--junit", tmp_path / "a.xml").code == 1
    assert {name for name, end in cases(tmp_path / "a.xml").items() if end == "failure"} == {FINITE}
    assert "w<&>" in "".join(ET.parse(tmp_path / "a.xml").getroot().itertext())
    place = bytes(data).index(torch.tensor([1.0, float("nan")]).numpy().tobytes())
    data[place] ^= 1
    (tmp_path / "nan.pt").write_bytes(data)
    assert run("verify", tmp_path / "nan.pt", "--junit", tmp_path / "a.xml").code == 1
    assert {name for name, end in cases(tmp_path / "a.xml").items() if end == "failure"} == {"checksums"}


def test_a_source_that_cannot_be_read_is_an_error_of_one_test(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 \x00")
    assert run("verify", tmp_path / "cut.pt", "--junit", tmp_path / "a.xml").code == 3
    assert cases(tmp_path / "a.xml") == {"readable": "error"}


@pytest.mark.parametrize("options", [(), ("--finite", "--include", "nothing")])
def test_every_end_without_a_result_is_an_error_and_replaces_an_earlier_success(
    run: Run, saved: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert run("verify", saved, "--junit", tmp_path / "a.xml").code == 0
    several = tmp_path / "run"
    for step in (1, 2):
        (several / f"step-{step}").mkdir(parents=True)
        torch.save({"w": torch.ones(2)}, several / f"step-{step}" / "model.pt")
    done = run("verify", saved if options else several, *options, "--junit", tmp_path / "a.xml")
    assert done.code == (2 if options else 4)
    assert cases(tmp_path / "a.xml") == {"readable": "error"}


def test_a_framework_that_does_not_resume_is_a_failure(run: Run, saved: Path, tmp_path: Path) -> None:
    assert run("verify", saved, "--for", "trainer", "--world-size", "6", "--junit", tmp_path / "a.xml").code == 1
    assert cases(tmp_path / "a.xml")["trainer resumes on 6 ranks"] == "failure"

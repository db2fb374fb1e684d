"""The page of ``inspect --report``: what it shows, that it stays small, and that no key can do anything in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import fsdpckpt
from fsdpckpt.cli.listing import listing
from fsdpckpt.describe import describe
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Evidence, EvidenceKind, Layout
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Inline, Stored
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.layouts import mesh_chunks, row_sharding
from fsdpckpt.report import MARK, check_report, write_report
from fsdpckpt.report.figures import COLUMNS, holdings, module_tree
from fsdpckpt.report.page import page
from tests.ir.checkpoints import checkpoint as full
from tests.ir.checkpoints import with_ledger, with_origin
from tests.verify.raw import Raw

torch = pytest.importorskip("torch")

HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</style></title><svg onload=\"document.title='owned'\">",
    "a\x00b\x1b[31m\u202e\ud800",
    "&lt;b&gt;" + "x" * 5000,
    "." * 3000,
)


def sharded(shape: tuple[int, ...], ranks: int, skip: frozenset[int] = frozenset()) -> Tensor:
    """A tensor of which every rank but those of ``skip`` holds its rows."""
    own = mesh_chunks(shape, row_sharding(ranks)).unshared
    boxes = [row for row in zip(own.rank.tolist(), own.start, own.size, strict=True) if row[0] not in skip]
    chunks = Chunks.rows(
        ndim=len(shape),
        rank=[rank for rank, *_ in boxes],
        file=[0] * len(boxes),
        offset=[0] * len(boxes),
        start=[start for _, start, _ in boxes],
        size=[size for *_, size in boxes],
    )
    return Tensor(DTYPES["float32"], shape, chunks, True, "[Shard(0)]")


def checkpoint(params: dict[str, Tensor], *, ranks: int = 4, optim: Optimizer | None = None) -> Checkpoint:
    held = full(params, optim, files=(Stored("somewhere/__0_0.distcp", 1),))
    held = with_origin(held, source="somewhere", layout=Layout.SHARDED, container=Container.DCP, world_size=ranks)
    return with_ledger(held, problems=tuple(problems(held)))


class Elements(HTMLParser):
    """Every element with its attributes, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_page() -> str:
    params = {f"{key}.{number}": sharded((9, 3), 2) for number, key in enumerate(HOSTILE)}
    params |= {key: sharded((5, 7), 2) for key in HOSTILE}
    groups = [{"lr": 0.5, HOSTILE[0]: HOSTILE[1], "params": list(HOSTILE)}]
    optim = Optimizer.of({key: {HOSTILE[0]: sharded((5, 7), 2), "step": 3} for key in HOSTILE}, groups)
    described = checkpoint(params, ranks=2, optim=optim)
    described = with_origin(described, source=HOSTILE[2])
    described = with_ledger(described, evidence=tuple(Evidence(EvidenceKind.CONTAINER, line) for line in HOSTILE))
    return page(describe(described))


def require_inert(html: str) -> None:
    """Keys are text, scripts are forbidden, and nothing is fetched."""
    elements = Elements(html)
    tags = {tag for tag, _ in elements.tags}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "base", "a", "form"}
    for tag, attributes in elements.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")], tag
    assert HOSTILE[0] in elements.text
    (policy,) = [found["content"] for _, found in elements.tags if found.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';") and "script-src" not in policy
    assert not re.search(r"url\(|@import|https?://", html)


def test_keys_that_look_like_html_stay_text_and_the_page_fetches_nothing() -> None:
    require_inert(hostile_page())


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_runs_nothing_that_a_key_says(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(hostile_page().encode("utf-8", "backslashreplace"))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    titles = re.findall(r"<title>(.*?)</title>", shown)
    assert titles
    assert titles[0] != "owned"
    assert "<svg onload" not in shown
    assert shown.count("<svg") == 4  # two tree maps and two sections


def test_every_byte_of_every_rank_is_counted() -> None:
    params = {f"layers.{n}.weight": sharded((17 + n, 9), 4) for n in range(700)}
    params["one.weight"] = sharded((40_003, 31), 4)
    root = module_tree(params.items())
    grid = holdings(root, 4)
    for rank in range(4):
        expected = sum(
            int(tensor.chunks.size[tensor.chunks.rank == rank].prod(axis=1).sum()) * 4 for tensor in params.values()
        )
        assert grid.nbytes[rank] == expected
    assert grid.nbytes.sum() == root.nbytes
    assert np.allclose(grid.covered, 1.0)
    # What all ranks hold of each column, drawn on the grid, is the column.
    assert np.allclose(grid.share.sum(axis=0), 1.0)


def test_ranks_are_drawn_behind_each_other_replicas_in_every_row_and_columns_as_part_of_every_row() -> None:
    grid = holdings(module_tree([("w", sharded((10, 3), 4))]), 4)  # 3, 3, 3 and 1 rows
    for rank, (begin, end) in enumerate(((0, 0.3), (0.3, 0.6), (0.6, 0.9), (0.9, 1.0))):
        filled = np.flatnonzero(grid.share[rank] > 0.5)
        assert (filled[0], filled[-1] + 1) == (begin * COLUMNS, end * COLUMNS)
    f32 = DTYPES["float32"]
    whole = Chunks.rows(ndim=2, rank=[0, 1, 2], file=[0] * 3, offset=[0] * 3, start=[(0, 0)] * 3, size=[(6, 5)] * 3)
    grid = holdings(module_tree([("w", Tensor(f32, (6, 5), whole))]), 3)
    assert (grid.share == 1.0).all() and grid.nbytes.tolist() == [120.0] * 3
    halves = Chunks.rows(ndim=2, rank=[0, 1], file=[0, 0], offset=[0, 0], start=[(0, 0), (0, 4)], size=[(6, 4), (6, 4)])
    grid = holdings(module_tree([("w", Tensor(f32, (6, 8), halves))]), 2)
    assert grid.nbytes.tolist() == [96.0, 96.0] and np.allclose(grid.share.sum(axis=1), COLUMNS / 2)


def test_what_no_rank_holds_is_marked_and_stands_on_top() -> None:
    html = page(describe(checkpoint({"up.weight": sharded((16, 5), 4, frozenset({2}))})))
    assert "held by no rank" in html
    assert html.index("1 problem") < html.index("Who holds what")
    assert "held by no rank" not in page(describe(checkpoint({"up.weight": sharded((16, 5), 4)})))


def test_a_page_of_very_many_tensors_and_ranks_stays_small() -> None:
    shapes = {n: sharded((64 * n + 3, 8), 1024) for n in range(1, 8)}
    params = {f"layers.{n // 10}.w{n}.weight": shapes[1 + n % 7] for n in range(1500)}
    many = {f"layers.{n // 10}.w{n}.weight": sharded((5, 3), 1) for n in range(20_000)}
    odd = Optimizer.of({"w": {f"state{n}": sharded((5, 3), 1) for n in range(3000)}}, None)
    for described in (
        checkpoint(params, ranks=1024),
        checkpoint(many, ranks=1),
        checkpoint({"w": sharded((5, 3), 1)}, ranks=1, optim=odd),
    ):
        assert len(page(describe(described))) < 1_000_000


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(6, 5, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}
    state = {
        name: {"step": torch.tensor(9.0), "exp_avg": torch.randn(6, 5, generator=generator) * 1e-3} for name in weights
    }
    state["b.weight"]["step"] = torch.tensor(7.0)
    state["c.weight"]["exp_avg"].zero_()
    weights["a.weight"][2, 3] = float("nan")
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(weights)}]
    torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "full.pt")
    return tmp_path / "full.pt"


def test_the_page_shows_what_was_read_and_says_what_was_not(trained: Path) -> None:
    html = page(fsdpckpt.inspect(trained, stats=True))
    text = Elements(html).text
    for said in (
        "optimizer: the steps disagree: 9 for 2 parameters, 7 for 1 parameter",
        "model a.weight: 1 NaN and 0 Inf of 30 elements", "1 tensor all zero", "betas=(0.9, 0.95)",
        f"{datetime.now().astimezone():%Y-%m-%d}", "in all: 9 tensors, 183 elements",
    ):  # fmt: skip
        assert said in text
    assert '<meta name="viewport" content="width=device-width' in html
    assert "@media (max-width: 640px)" in html
    cells = [attributes for tag, attributes in Elements(html).tags if tag == "td"]
    assert cells and all(attributes.get("data-label") for attributes in cells), "for narrow screens"
    text = Elements(page(fsdpckpt.inspect(trained))).text
    assert "the values of step were not read (--stats reads them)" in text
    assert "Root mean squares" not in text
    assert "No problems found in headers and metadata" in text


def test_steps_beyond_a_million_are_shown_with_all_their_digits(trained: Path) -> None:
    state = torch.load(trained)
    for number, states in enumerate(state["optimizer"]["state"].values()):
        states["step"].fill_(1234567.0 + number // 2)
    torch.save(state, trained)
    expected = "the steps disagree: 1,234,567 for 2"
    assert (
        f"optimizer: {expected} parameters, 1,234,568 for 1 parameter"
        in Elements(page(fsdpckpt.inspect(trained, stats=True))).text
    )
    (problem,) = [each for each in fsdpckpt.verify(trained).problems if each.kind == "step"]
    assert expected in problem.message
    assert "1,234,568 for 1 (c.weight)" in problem.message


def test_steps_of_different_param_groups_may_differ(tmp_path: Path) -> None:
    """A group that was added later has done fewer steps; ``verify`` says nothing of it either."""
    first, later = (torch.nn.Parameter(torch.randn(3, 5)) for _ in range(2))
    optimizer = torch.optim.Adam([first])
    for params in ([first], [first, later]):
        for param in params:
            param.grad = torch.randn(3, 5)
        if len(params) > 1:
            optimizer.add_param_group({"params": [later]})
        optimizer.step()
    torch.save({"model": {"a": first, "b": later}, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    text = Elements(page(fsdpckpt.inspect(tmp_path / "a.pt", stats=True))).text
    assert "The steps agree within each param group: 2 for 1 parameter, 1 for 1 parameter" in text
    assert "No problems found" in text and fsdpckpt.verify(tmp_path / "a.pt").whole


def test_a_mask_of_minus_infinity_is_no_problem_and_a_weight_is(tmp_path: Path) -> None:
    for rank in range(2):
        whole = torch.full((4, 4), float("-inf")).triu(1)
        shards = {"w": torch.full((3, 2), float("inf")), "v": torch.rand(3, 2)}
        torch.save({"mask": whole, **shards}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    described = fsdpckpt.inspect(tmp_path, stats=True)
    model = described.checkpoint.model
    for name, tensor in model.params.items():  # as a sharded checkpoint says it
        assert isinstance(tensor, Tensor)
        model.params[name] = replace(tensor, sharded=name != "mask")
    html = page(described)
    top, rest = html.split("Who holds what", 1)
    assert "model w: 0 NaN and 6 Inf of 6 elements" in top
    assert "model mask" not in top
    assert "model mask: 0 NaN and 6 Inf of 16 elements" in rest


def test_an_earlier_report_is_replaced_and_anything_else_is_left_alone(trained: Path, tmp_path: Path) -> None:
    described = fsdpckpt.inspect(trained)
    path = tmp_path / "report.html"
    for _ in range(2):
        write_report(described, str(path))
    assert path.read_text().startswith(MARK)
    other = tmp_path / "notes.html"
    other.write_text("<p>mine")
    for taken in (other, tmp_path):
        with pytest.raises(TargetExistsError):
            write_report(described, str(taken))
    assert other.read_text() == "<p>mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["full.pt", "notes.html", "report.html"]


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(0o555)
    paths = [tmp_path / "nowhere" / "report.html", tmp_path / "file" / "report.html"]
    for path in [*paths, *([tmp_path / "locked" / "report.html"] if os.geteuid() else [])]:
        with pytest.raises(TargetUnwritableError, match="cannot be written"):
            check_report(str(path), "checkpoint.pt")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_report_that_cannot_be_completed_leaves_nothing(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise error

    described = fsdpckpt.inspect(trained)
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises((TargetUnwritableError, KeyboardInterrupt)):
        write_report(described, str(tmp_path / "report.html"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["full.pt"]


def test_values_that_lie_in_no_file_are_not_shown_as_files(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    described = describe(raw.checkpoint({"w": raw.put(np.float32([1, 2]))}))
    literal = Inline(b"\0\0@@")
    described.checkpoint.files = (literal, *described.checkpoint.files)
    step = Tensor(DTYPES["float32"], (), Chunks.whole(file=0, offset=0, shape=()))
    described = describe(replace(described.checkpoint, model=None, extra={"step": step}))
    html = page(described)
    assert "in 1 file<" in html
    assert "1 file</summary>" in html
    assert str(literal) not in html
    document = described.to_json(ranks=True)
    assert str(literal) not in json.dumps(document)
    assert document["tensors"][0]["pieces"][0]["file"] is None  # type: ignore[index,call-overload]
    lines, _ = listing(described, ranks=True, unfold=True, columns=None)
    assert not any(str(literal) in line for line in lines)


def test_layers_of_a_hugging_face_model_are_one_row_with_the_size_of_each(trained: Path) -> None:
    params = {"model.embed_tokens.weight": sharded((64, 16), 4)}
    for n in range(32):
        for part, shape in (("self_attn.q_proj", (16, 16)), ("mlp.up_proj", (48, 16)), ("input_layernorm", (16,))):
            params[f"model.layers.{n}.{part}.weight"] = sharded(shape, 4)
    params |= {"model.norm.weight": sharded((16,), 4), "lm_head.weight": sharded((64, 16), 4)}
    html = page(describe(checkpoint(params)))
    rows = re.findall(r"<tr>(<td data-label=\"module\".*?)</tr>", html)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    named = {row[0]: row[1:3] for row in cells}
    assert named["model.layers.{0..31}  x32"] == ["4.1 KiB", "130.0 KiB"]
    assert named["model.layers.{0..31}.mlp.up_proj.weight  x32"] == ["3.0 KiB", "96.0 KiB"]
    assert named["model.layers"] == ["130.0 KiB", ""]
    assert len(rows) < 15


def _luminance(colour: str) -> float:
    """Of ``#rrggbb``, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_can_be_read_on_every_ground_in_both_schemes_and_paper_has_the_light_one() -> None:
    style = hostile_page().partition("</style>")[0]
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part))
        for part in style.partition("prefers-color-scheme: dark")[::2]
    )
    for scheme in (light, dark):
        pairs = [(text, ground) for text in ("text", "quiet") for ground in ("ground", "panel")]
        pairs += [("text", ground) for ground in ("module0", "module1", "tensor", "badground", "barground")]
        pairs += [("bad", "badground"), ("ground", "hue")]
        for text, ground in pairs:
            lighter, darker = sorted((_luminance(scheme[text]), _luminance(scheme[ground])), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{text} {scheme[text]} on {ground} {scheme[ground]}"
    assert "@media screen and (prefers-color-scheme: dark)" in style
    assert "@media print { :root { color-scheme: light" in style

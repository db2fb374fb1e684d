"""What a conversion writes, settled from the options, DST's suffix and the source's layout."""

from __future__ import annotations

import pytest

from fsdpckpt.converters.target.layout import choose_layout, require_file_name
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.options import ConvertOptions
from tests.flat.flat_synthetic import checkpoint
from tests.ir.checkpoints import with_origin

FULL, SHARDED = Layout.FULL, Layout.SHARDED
TORCH, DCP, SAFETENSORS = Container.TORCH, Container.DCP, Container.SAFETENSORS


@pytest.mark.parametrize(
    ("target", "options", "source", "layout", "container", "directory"),
    [
        ("out.pt", {}, SHARDED, FULL, TORCH, False),
        ("out.ckpt", {}, FULL, FULL, TORCH, False),
        ("out.safetensors", {}, SHARDED, FULL, SAFETENSORS, False),
        ("out", {"container": SAFETENSORS}, SHARDED, FULL, SAFETENSORS, True),
        ("out", {}, SHARDED, SHARDED, DCP, True),
        ("out/", {"world_size": 3}, SHARDED, SHARDED, DCP, True),
        ("out", {"to": SHARDED, "world_size": 5}, FULL, SHARDED, DCP, True),
        ("out", {"to": SHARDED, "container": TORCH, "world_size": 2}, FULL, SHARDED, TORCH, True),
        ("out", {"to": FULL}, SHARDED, FULL, TORCH, False),
        ("out", {"to": FULL, "container": DCP}, SHARDED, FULL, DCP, True),
        ("step.100", {}, SHARDED, SHARDED, DCP, True),
    ],
)
def test_options_suffix_and_source_together_say_what_is_written(
    target: str, options: dict[str, object], source: Layout, layout: Layout, container: Container, directory: bool
) -> None:
    spec = choose_layout(target, ConvertOptions(**options), checkpoint(4, layout=source))
    assert (spec.layout, spec.container, spec.directory) == (layout, container, directory)
    assert spec.world_size == options.get("world_size")


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("out.pt", {"to": SHARDED}, "ends in .pt"),
        ("out.pt", {"container": DCP}, "container says dcp"),
        ("out.safetensors", {"to": SHARDED}, "whole tensors"),
        ("out", {"to": FULL, "world_size": 4}, "to='full' is not"),
        ("out.pt", {"world_size": 4}, "one file .* is not sharded"),
        ("out", {"container": Container.SAFETENSORS, "world_size": 4}, "safetensors target is not sharded"),
        ("out", {"to": SHARDED, "world_size": 2_000_000}, "world_size has too many ranks"),
        ("out", {"flavor": "verl", "world_size": 2_000_000}, "world_size has too many ranks"),
        ("out", {"to": Layout.FLATTENED, "world_size": 2, "container": Container.DCP}, "one per rank"),
    ],
)
def test_contradictions_are_refused_with_what_to_type_instead(
    target: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        choose_layout(target, ConvertOptions(**options), checkpoint(4, layout=SHARDED))
    assert caught.value.next_step or caught.value.expected


@pytest.mark.parametrize("options", [{"to": SHARDED, "container": TORCH}, {"to": Layout.FLATTENED}], ids=str)
def test_rank_files_keep_their_ranks_and_other_sources_need_a_number(options: dict[str, object]) -> None:
    by_rank = checkpoint(4, layout=SHARDED)
    assert choose_layout("out", ConvertOptions(**options), by_rank).world_size == 4
    for source in (with_origin(by_rank, container=DCP), checkpoint(1, layout=FULL)):
        with pytest.raises(UsageError, match="need a number of ranks") as caught:
            choose_layout("out", ConvertOptions(**options), source)
        assert caught.value.next_step == "add --world-size N"


def test_a_world_size_for_a_full_source_says_what_to_add() -> None:
    with pytest.raises(UsageError, match="the source is full") as caught:
        choose_layout("out", ConvertOptions(world_size=4), checkpoint(1, layout=FULL))
    assert str(caught.value.next_step).startswith("add --to sharded")


@pytest.mark.parametrize(
    ("target", "options", "next_step"),
    [
        ("out", {"flavor": "verl", "container": DCP}, "drop --container, and add --world-size N"),
        ("out", {"flavor": "verl", "container": DCP, "world_size": 3}, "drop --container"),
        ("out", {"flavor": "verl", "to": FULL}, "drop --to, and add --world-size N"),
        ("out", {"flavor": "torchtitan", "to": FULL, "container": SAFETENSORS}, "drop --to and --container"),
        ("out", {"flavor": "huggingface", "world_size": 4}, "drop --world-size"),
        ("out.pt", {"flavor": "torchtitan"}, "give DST a name without a suffix"),
    ],
)
def test_a_form_that_a_producer_does_not_have_names_the_option_to_drop(
    target: str, options: dict[str, object], next_step: str
) -> None:
    with pytest.raises(UsageError, match=f"flavor='{options['flavor']}' cannot be combined with") as caught:
        choose_layout(target, ConvertOptions(**options), checkpoint(4, layout=SHARDED))
    given = [f"--{name.replace('_', '-')} {value}" for name, value in options.items() if name != "flavor"]
    assert all(words in caught.value.what for words in given or ["one .pt file"])
    assert caught.value.next_step == next_step


@pytest.mark.parametrize(("target", "advised"), [("x.pt/", True), ("x/", False)])
def test_a_name_that_the_advice_would_be_refused_with_is_said_to_be_changed(target: str, advised: bool) -> None:
    """``--to sharded`` refuses ``x.pt/``."""
    source = checkpoint(4, layout=FULL)
    with pytest.raises(UsageError, match="names a directory") as error:
        require_file_name(target, choose_layout(target, ConvertOptions(), source))
    assert ("a name without a suffix" in str(error.value.next_step)) == advised

"""What a conversion writes, settled from the options, DST's suffix and the source's layout.

Without ``--flavor`` that is what the source's framework loads, or plain with a note that names that form.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.layout import choose_layout, require_file_name
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, NamedSection, Section
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers.table import FLAVORS
from tests.flat.flat_synthetic import checkpoint
from tests.ir.checkpoints import with_origin

FULL, SHARDED, FLATTENED = Layout.FULL, Layout.SHARDED, Layout.FLATTENED
TORCH, DCP, SAFETENSORS = Container.TORCH, Container.DCP, Container.SAFETENSORS
FLATTENED_KEYS = frozenset(flavor.name for flavor in FLAVORS for form in flavor.forms if form.flattened)


def source(
    flavor: str, layout: Layout, container: Container, *, optim: bool = True, adapter: bool = False
) -> Checkpoint:
    """A checkpoint of 4 ranks; of an adapter alone, if that."""
    model = ModelState({"base_model.model.layer.lora_A.weight": None} if adapter else {})
    state = Optimizer.of({}, []) if optim else None
    held = checkpoint(4, model=model, optim=state, layout=layout, container=container)
    return with_origin(held, flavor=flavor, flattened_keys=flavor in FLATTENED_KEYS)


def spec(held: Checkpoint, target: str = "out", **options: object) -> Decision:
    return choose_layout(target, ConvertOptions(**options), held)


def described(found: Decision) -> tuple[str, Layout, Container, int | None]:
    return found.flavor.name if found.flavor is not None else "plain", found.layout, found.container, found.world_size


SIX: dict[str, object] = {"world_size": 6}
TO_SIX: dict[str, object] = {"to": SHARDED, **SIX}


@pytest.mark.parametrize(
    ("flavor", "held", "options", "expected"),
    [
        # N -> M: the source's own form
        ("trainer", (SHARDED, DCP), SIX, (SHARDED, DCP, 6)),
        ("trainer", (FULL, TORCH), SIX, (FULL, TORCH, 6)),  # the same weights, random states for 6 ranks
        ("trainer", (FULL, DCP), SIX, (SHARDED, DCP, 6)),  # one rank saved it
        ("torchtitan", (FULL, DCP), {}, (SHARDED, DCP, None)),
        ("accelerate", (SHARDED, TORCH), SIX, (SHARDED, TORCH, 6)),
        ("accelerate", (SHARDED, TORCH), TO_SIX, (SHARDED, TORCH, 6)),
        ("accelerate", (FLATTENED, TORCH), SIX, (FLATTENED, TORCH, 6)),
        ("verl", (SHARDED, TORCH), SIX, (SHARDED, TORCH, 6)),
        ("verl", (FLATTENED, TORCH), SIX, (FLATTENED, TORCH, 6)),
        ("lightning", (SHARDED, DCP), SIX, (SHARDED, DCP, 6)),
        ("lightning-model-parallel", (SHARDED, DCP), SIX, (SHARDED, DCP, 6)),
        ("fabric", (SHARDED, DCP), SIX, (SHARDED, DCP, 6)),
        ("torchtitan", (SHARDED, DCP), SIX, (SHARDED, DCP, 6)),
        ("torchtitan-old", (SHARDED, DCP), SIX, (SHARDED, DCP, 6)),
        # the same number of ranks
        ("trainer", (SHARDED, DCP), {}, (SHARDED, DCP, None)),
        ("verl", (SHARDED, TORCH), {}, (SHARDED, TORCH, 4)),
        ("accelerate", (SHARDED, TORCH), {"dtype": "bfloat16"}, (SHARDED, TORCH, 4)),
        # another layout or container, where the framework has it
        ("trainer", (SHARDED, DCP), {"to": FULL}, (FULL, TORCH, None)),
        ("trainer", (FULL, TORCH), TO_SIX, (SHARDED, DCP, 6)),
        ("accelerate", (SHARDED, TORCH), {**SIX, "container": DCP}, (SHARDED, DCP, 6)),
        ("accelerate", (SHARDED, DCP), {"to": FLATTENED, **SIX}, (FLATTENED, TORCH, 6)),
        ("verl", (SHARDED, TORCH), {"to": FLATTENED, **SIX}, (FLATTENED, TORCH, 6)),
        ("lightning", (SHARDED, DCP), {"to": FULL}, (FULL, TORCH, None)),
        ("lightning", (FULL, TORCH), TO_SIX, (SHARDED, DCP, 6)),
        ("trainer", (SHARDED, DCP), {"only": Section.MODEL, **SIX}, (SHARDED, DCP, 6)),
    ],
)
def test_the_form_of_the_sources_framework_is_the_default(
    flavor: str, held: tuple[Layout, Container], options: dict[str, object], expected: tuple[Any, ...]
) -> None:
    found = spec(source(flavor, *held), **options)
    assert described(found) == (flavor, *expected) and not found.notes


@pytest.mark.parametrize("flavor", ["lightning", "lightning-model-parallel", "fabric"])
def test_one_file_by_lightnings_own_suffix_is_lightnings(flavor: str) -> None:
    found = spec(source(flavor, SHARDED, DCP), "last.ckpt")
    assert described(found) == (flavor, FULL, TORCH, None) and not found.directory
    assert described(spec(source(flavor, SHARDED, DCP), "full.pt"))[0] == "plain"


def test_hugging_faces_weights_stay_what_they_are() -> None:
    weights = source("huggingface", FULL, SAFETENSORS, optim=False)
    assert described(spec(weights, dtype="bfloat16")) == ("huggingface", FULL, SAFETENSORS, None)
    with_optimizer = source("huggingface", FULL, SAFETENSORS)
    assert described(spec(with_optimizer)) == ("plain", FULL, TORCH, None), "its optimizer has no place there"


@pytest.mark.parametrize(
    ("flavor", "held", "target", "options", "expected", "named"),
    [
        ("trainer", (SHARDED, DCP), "full.pt", {}, (FULL, TORCH, None), "--flavor trainer --to sharded"),
        ("verl", (SHARDED, TORCH), "full.pt", {}, (FULL, TORCH, None), "--flavor verl --to sharded --container torch"),
        ("verl", (SHARDED, TORCH), "out", {"container": DCP}, (SHARDED, DCP, None), "--world-size N"),
        ("verl", (FLATTENED, TORCH), "out", {"to": FULL}, (FULL, TORCH, None), "--flavor verl --to flattened"),
        ("accelerate", (SHARDED, DCP), "out", {"container": SAFETENSORS}, (FULL, SAFETENSORS, None), "accelerate"),
        ("torchtitan", (SHARDED, DCP), "out", {"to": FLATTENED, **SIX}, (FLATTENED, TORCH, 6), "torchtitan"),
        ("trainer", (SHARDED, DCP), "out", {"key_type": "id"}, (SHARDED, DCP, None), "--key-type id"),
        ("trainer", (SHARDED, DCP), "out", {"only": Section.OPTIM}, (SHARDED, DCP, None), "--only optim"),
        ("huggingface", (FULL, SAFETENSORS), "out", TO_SIX, (SHARDED, DCP, 6), "loads with it"),
        ("composer", (SHARDED, DCP), "out", SIX, (SHARDED, DCP, 6), "reads the flavor composer, but does not write it"),
    ],
)
def test_where_the_framework_has_no_such_form_the_target_is_plain_and_says_what_resumes(
    flavor: str,
    held: tuple[Layout, Container],
    target: str,
    options: dict[str, object],
    expected: tuple[Any, ...],
    named: str,
) -> None:
    found = spec(source(flavor, *held), target, **options)
    assert described(found) == ("plain", *expected)
    (note,) = found.notes
    assert note.kind == "plain" and named in note.message


def test_plain_is_what_the_source_or_the_user_says_and_needs_no_note() -> None:
    assert described(spec(source("plain", SHARDED, DCP), **SIX)) == ("plain", SHARDED, DCP, 6)
    asked = spec(source("trainer", SHARDED, DCP), flavor="plain", **SIX)
    assert described(asked) == ("plain", SHARDED, DCP, 6) and not asked.notes
    ranks = spec(source("verl", SHARDED, TORCH), flavor="plain", **SIX)
    assert described(ranks) == ("plain", SHARDED, DCP, 6)


def test_keys_that_are_not_the_frameworks_stay_as_they_are() -> None:
    nested = with_origin(source("torchtitan", SHARDED, DCP), flattened_keys=False)
    assert described(spec(nested, **SIX))[0] == "plain", "its loader takes flattened keys only"
    own = with_origin(
        source("fabric", SHARDED, DCP), nesting={Section.MODEL: ("net",), Section.OPTIM: ("training", "adam")}
    )
    form = spec(own, **SIX).form
    assert form is not None and form.optim is not None
    assert (form.model.keys, form.optim.keys) == (("net",), ("training", "adam"))


def several(flavor: str, layout: Layout, container: Container) -> Checkpoint:
    """A checkpoint with two optimizers, neither of which is the main one."""
    names = ("generator", "critic")
    named = tuple(NamedSection(Section.OPTIM, name, (name,), Optimizer.of({}, [])) for name in names)
    return replace(source(flavor, layout, container, optim=False), named=named)


@pytest.mark.parametrize("flavor", ["lightning", "lightning-model-parallel", "fabric"])
def test_several_optimizers_have_a_place_in_frameworks_that_save_several(flavor: str) -> None:
    for target, form in (("out", (SHARDED, DCP)), ("out.ckpt", (FULL, TORCH))):
        assert described(spec(several(flavor, *form), target))[:3] == (flavor, *form)


def test_a_framework_with_one_optimizer_is_not_the_default_of_several() -> None:
    found = spec(several("trainer", SHARDED, DCP), **SIX)
    assert described(found)[0] == "plain"
    assert "flavor trainer does not save optim:generator and optim:critic" in found.notes[0].message
    alone = spec(several("trainer", SHARDED, DCP), only=Section.MODEL, **SIX)
    assert described(alone)[0] == "trainer"


def test_every_writable_framework_is_the_default_of_each_of_its_own_forms() -> None:
    for flavor in FLAVORS:
        for form in flavor.forms:
            optim = form.optim is not None
            held = source(flavor.name, form.layout, form.container, optim=optim, adapter=form.adapter)
            found = spec(with_origin(held, flattened_keys=form.flattened))
            assert found.form is form and found.flavor is flavor, flavor.name


# Layout, container and ranks


@pytest.mark.parametrize(
    ("target", "options", "held", "expected", "directory"),
    [
        ("out.pt", {}, SHARDED, (FULL, TORCH), False),
        ("out.ckpt", {}, FULL, (FULL, TORCH), False),
        ("out.safetensors", {}, SHARDED, (FULL, SAFETENSORS), False),
        ("out", {"container": SAFETENSORS}, SHARDED, (FULL, SAFETENSORS), True),
        ("out", {}, SHARDED, (SHARDED, DCP), True),
        ("out/", {"world_size": 3}, SHARDED, (SHARDED, DCP), True),
        ("out", {"to": SHARDED, "world_size": 5}, FULL, (SHARDED, DCP), True),
        ("out", {"to": SHARDED, "container": TORCH, "world_size": 2}, FULL, (SHARDED, TORCH), True),
        ("out", {"to": FULL}, SHARDED, (FULL, TORCH), False),
        ("out", {"to": FULL, "container": DCP}, SHARDED, (FULL, DCP), True),
        ("step.100", {}, SHARDED, (SHARDED, DCP), True),
    ],
)
def test_options_suffix_and_source_together_say_what_is_written(
    target: str, options: dict[str, object], held: Layout, expected: tuple[Any, ...], directory: bool
) -> None:
    found = spec(checkpoint(4, layout=held), target, **options)
    assert (found.layout, found.container) == expected and found.directory is directory
    assert found.world_size == options.get("world_size")


VERL_DCP: dict[str, object] = {"flavor": "verl", "container": DCP}
NEED_RANKS = ("need a number of ranks", "add --world-size N")


@pytest.mark.parametrize(
    ("held", "target", "options", "words", "next_step"),
    [
        (SHARDED, "out.pt", {"to": SHARDED}, "ends in .pt", None),
        (SHARDED, "out.pt", {"container": DCP}, "container says dcp", None),
        (SHARDED, "out.safetensors", {"to": SHARDED}, "whole tensors", None),
        (SHARDED, "out", {"to": FULL, "world_size": 4}, "to='full' is not", None),
        (SHARDED, "out.pt", {"world_size": 4}, "one file .* is not sharded", None),
        (SHARDED, "out", {"container": SAFETENSORS, "world_size": 4}, "safetensors target is not sharded", None),
        (SHARDED, "out", {"to": SHARDED, "world_size": 2_000_000}, "world_size has too many ranks", None),
        (SHARDED, "out", {"flavor": "verl", "world_size": 2_000_000}, "world_size has too many ranks", None),
        (SHARDED, "out", {"to": FLATTENED, "world_size": 2, "container": DCP}, "one per rank", None),
        (FULL, "out", {"world_size": 4}, "the source is full", "add --to sharded"),
        *(
            (held, "out", options, *NEED_RANKS)
            for held in (DCP, FULL)
            for options in ({"to": SHARDED, "container": TORCH}, {"to": FLATTENED})
        ),
        # a form that a producer does not have
        (SHARDED, "out", VERL_DCP, "--container dcp", "drop --container, and add --world-size N"),
        (SHARDED, "out", {**VERL_DCP, "world_size": 3}, "(?=.*--container dcp).*--world-size 3", "drop --container"),
        (SHARDED, "out", {"flavor": "verl", "to": FULL}, "--to full", "drop --to, and add --world-size N"),
        (SHARDED, "out", {"flavor": "torchtitan", "to": FULL, "container": SAFETENSORS},
         "(?=.*--to full).*--container safetensors", "drop --to and --container"),
        (SHARDED, "out", {"flavor": "huggingface", "world_size": 4}, "--world-size 4", "drop --world-size"),
        (SHARDED, "out.pt", {"flavor": "torchtitan"}, "one .pt file", "give DST a name without a suffix"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_what_to_type_instead(
    held: Layout | Container, target: str, options: dict[str, object], words: str, next_step: str | None
) -> None:
    source = checkpoint(4, layout=held) if isinstance(held, Layout) else with_origin(BY_RANK, container=held)
    with pytest.raises(UsageError) as caught:
        spec(source, target, **options)
    error, said = caught.value, str(caught.value.next_step)
    assert re.search(words, f"{error} {error.what}")
    assert error.next_step or error.expected
    if next_step is not None:
        assert said == next_step or (held is FULL and said.startswith(next_step))
        assert "flavor" not in options or f"--flavor {options['flavor']} cannot be combined with" in error.what


BY_RANK = checkpoint(4, layout=SHARDED)


@pytest.mark.parametrize("options", [{"to": SHARDED, "container": TORCH}, {"to": FLATTENED}], ids=str)
def test_rank_files_keep_their_ranks(options: dict[str, object]) -> None:
    assert spec(BY_RANK, **options).world_size == 4


@pytest.mark.parametrize(("target", "advised"), [("x.pt/", True), ("x/", False)])
def test_a_name_that_the_advice_would_be_refused_with_is_said_to_be_changed(target: str, advised: bool) -> None:
    """``--to sharded`` refuses ``x.pt/``."""
    with pytest.raises(UsageError, match="names a directory") as error:
        require_file_name(target, spec(checkpoint(4, layout=FULL), target))
    assert ("a name without a suffix" in str(error.value.next_step)) == advised


def test_ranks_of_another_framework_have_to_be_named() -> None:
    with pytest.raises(UsageError, match="a number of ranks"):
        spec(source("trainer", SHARDED, DCP), flavor="verl")
    with pytest.raises(UsageError, match="the source is full"):
        spec(source("lightning", FULL, TORCH), **SIX)

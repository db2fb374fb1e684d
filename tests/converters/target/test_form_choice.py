"""Without ``--flavor`` the target is what the source's framework loads, or plain with a note that names that form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.layout import choose_layout
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
    return choose_layout(target, ConvertOptions(**options), held)  # type: ignore[arg-type]


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
    flavor: str,
    held: tuple[Layout, Container],
    options: dict[str, object],
    expected: tuple[Layout, Container, int | None],
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
    expected: tuple[Layout, Container, int | None],
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
@pytest.mark.parametrize(("layout", "container"), [(SHARDED, DCP), (FULL, TORCH)])
def test_several_optimizers_have_a_place_in_frameworks_that_save_several(
    flavor: str, layout: Layout, container: Container
) -> None:
    target = "out.ckpt" if layout is FULL else "out"
    assert described(spec(several(flavor, layout, container), target))[:3] == (flavor, layout, container)


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


def test_ranks_of_another_framework_have_to_be_named() -> None:
    with pytest.raises(UsageError, match="a number of ranks"):
        spec(source("trainer", SHARDED, DCP), flavor="verl")
    with pytest.raises(UsageError, match="the source is full"):
        spec(source("lightning", FULL, TORCH), **SIX)

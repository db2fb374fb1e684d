"""Ids and names of real optimizers, against what torch.optim numbers and what FSDP's own rekeying gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from tests.converters.jobs import RANK_FILES, Job, converted, listed, refused, save, states
from tests.oracle import toy
from tests.oracle.compare import require_identical
from tests.oracle.forms import form
from tests.oracle.session import Oracle

GOLDEN = Path(__file__).parents[1] / "golden"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.wide = nn.Linear(7, 11)
        self.narrow = nn.Linear(11, 7, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(7, 13)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(5))


PARAMS = dict(Model().named_parameters())
NAMES = list(PARAMS)
GROUPS: dict[str, dict[str, Any]] = {
    "one group": {},
    "by dimension": {"groups": [[n for n in NAMES if PARAMS[n].ndim == dims] for dims in (1, 2)]},
    "named": {"groups": [[n for n in NAMES if ("layers.1" in n) is last] for last in (True, False)], "words": ""},
}


def groups_of(content: Any) -> list[Any]:
    groups = content.get("optimizer", content)["param_groups"]
    return [(group["params"], group.get("param_names")) for group in groups]


@pytest.mark.parametrize("groups", GROUPS)
def test_ids_become_the_names_that_fsdp_gives_them_and_ids_again(groups: str) -> None:
    model = Model()
    job = Job(model, **GROUPS[groups])
    by_fsdp = FullyShardedDataParallel.rekey_optim_state_dict(
        job.ids, OptimStateKeyType.PARAM_NAME, model, optim=job.optimizer
    )
    named = converted(save(job.saved()), "named.pt", key_type="name")
    assert list(states(named)) == list(by_fsdp["state"])
    # FSDP sorts each group's names, which forgets their ids; these are in the optimizer's order.
    assert [sorted(names) for names, _ in groups_of(named)] == [group["params"] for group in by_fsdp["param_groups"]]
    require_identical(states(named), job.named()["state"])
    save({"model": job.model, "optimizer": by_fsdp}, "sorted.pt")
    for source in ("named.pt", "sorted.pt"):  # both get the ids that they had
        again = converted(source, f"{source}.ids.pt", key_type="id")
        assert list(states(again)) == list(job.ids["state"]) and groups_of(again) == groups_of(job.ids)
        require_identical(states(again), job.ids["state"])


# Second names, and tensors that only look like them


def cloned(model: nn.Module) -> dict[str, torch.Tensor]:
    """As FSDP1's full files hold tied weights: twice."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_tied_weight_of_a_full_file_is_one_parameter_even_as_a_copy() -> None:
    """The order and the shapes tell which name has no id."""
    model = Model()
    save({"model": cloned(model), "optimizer": Job(model).ids})
    assert list(states(converted("source.pt", "out.pt", key_type="name"))) == NAMES


@pytest.mark.parametrize("alike", [True, False], ids=["equal", "different"])
def test_copies_are_not_taken_for_a_tied_weight_by_their_values(alike: bool) -> None:
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    job = Job(model)
    assert list(states(converted(save(job.saved()), "tied.pt", key_type="name"))) == ["0.weight", "2.weight"]
    copies = cloned(model)
    if not alike:
        copies["1.weight"] += 1
    save({"model": copies, "optimizer": job.ids})
    asked = refused(NeedsInformationError, "", "source.pt", "out.pt", key_type="name")
    assert ("1.weight may be another name" in str(asked.why)) is alike


@pytest.mark.parametrize("fill", [0.0, 1.0], ids=["zeros", "ones"])
@pytest.mark.parametrize("shape", [(4, 4), (4,)], ids=["matrices", "vectors"])
def test_parameters_that_are_equal_since_they_were_made_keep_their_own_states(
    fill: float, shape: tuple[int, ...]
) -> None:
    """As LoRA's second factors: the base weight is frozen, and two adapters of zeros have one state each."""
    job = Job(dict.fromkeys("abcd", shape), [["b", "c", "d"]])
    for name in "cd":
        job.model[name].fill_(fill)
    refused(NeedsInformationError, "d may be another name", save(job.saved()), "out.pt", key_type="name")
    del job.model["a"]
    assert list(states(converted(save(job.saved()), "out.pt", key_type="name"))) == ["b", "c", "d"]


@pytest.mark.parametrize("with_states", [[], [0]])
def test_equal_vectors_are_not_taken_for_second_names(with_states: list[int]) -> None:
    """The bias of a norm, which is still zero, and a running mean of zeros are two tensors: which has no id is open."""
    job = Job(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.LayerNorm(4)))
    optimizer = job.ids
    optimizer["state"] = {number: optimizer["state"][number] for number in with_states}
    for name in ("1.bias", "2.running_mean", "3.bias"):
        job.model[name].zero_()
    save({"model": job.model, "optimizer": optimizer})
    refused(NeedsInformationError, "", "source.pt", "out.pt", key_type="name")


# Parameters without dimensions


class Scaled(nn.Module):
    """A parameter without dimensions, as CLIP's ``logit_scale``, before a buffer of floats."""

    def __init__(self, buffer: str) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer(buffer, torch.rand(4, 4) if buffer == "freqs" else torch.tensor(2.5))
        self.head = nn.Linear(5, 3)


SCALED = ["logit_scale", "head.weight", "head.bias"]


def test_moments_without_dimensions_are_those_of_a_parameter_without_dimensions() -> None:
    named = converted(save(Job(Scaled("freqs")).saved()), "named.pt", key_type="name")
    assert list(states(named)) == SCALED  # and not ``freqs``, of which there are as many as ids, too
    assert list(states(converted("named.pt", "ids.pt", key_type="id"))) == [0, 1, 2]
    wrong = {"key_type": "name", "parameters": listed([["freqs", *SCALED[1:]]])}
    error = refused(SourceCorruptError, "", "source.pt", "out.pt", **wrong)
    assert error.details == ("id 0 has states of shape [], which no parameter of --parameters has",)
    two = save(Job(Scaled("gain")).saved())
    ambiguous = refused(NeedsInformationError, "", two, "out.pt", key_type="name")
    assert ambiguous.details == ("id 0 may be logit_scale or gain",)
    assert list(states(converted(two, "out.pt", key_type="name", buffers=["gain"]))) == SCALED


@pytest.mark.parametrize("told", ["--parameters", "param_names"])
def test_a_parameter_without_dimensions_and_states_is_one_in_distributed_data_parallel(told: str) -> None:
    """The list of names, which has no ``module.``, says that it is no buffer."""
    saved = Job(Scaled("gain"), words="" if told == "param_names" else None).saved(lead="module.")
    del saved["optimizer"]["state"][0]
    options = {"parameters": listed([SCALED])} if told == "--parameters" else {}
    ((found, _),) = groups_of(converted(save(saved), "out.pt", key_type="name", **options))
    assert found == [f"module.{name}" for name in SCALED]


# Whose order is none


@pytest.mark.parametrize(
    "order",
    [
        "0.up 1.up 2.up 0.down 1.down 2.down",
        "0.up 1.up 1.down 0.down 2.up 2.down",
        "0.up 2.up 2.down 1.up 1.down 0.down",
    ],
)
def test_keys_that_come_back_to_a_module_are_in_no_model_s_order(order: str) -> None:
    """Some script put them together so: ids in this order would be other parameters, silently."""
    names = [f"blocks.{n}.{each}.weight" for n in range(3) for each in ("up", "down")]
    job = Job(dict.fromkeys(names, (4, 4)))
    save(job.saved(), "same.pt")
    put_together = {f"blocks.{word}.weight": job.model[f"blocks.{word}.weight"] for word in order.split()}
    assert sorted(put_together) == sorted(names) and list(put_together) != names
    save({"model": put_together, "optimizer": job.ids})
    words = "the order of the parameters is not recorded"
    refused(NeedsInformationError, words, "source.pt", "out.pt", key_type="name")
    for options in ({"parameters": listed([names])}, {"reference": "same.pt"}):
        assert list(states(converted("source.pt", "out.pt", key_type="name", overwrite=True, **options))) == names
    assert list(states(converted("same.pt", "named.pt", key_type="name"))) == names


def test_a_dcp_directory_without_planner_data_is_no_order() -> None:
    job = Job(Model())
    options = {"key_type": "name", "only": "optim"}
    save({"optimizer": job.ids})
    weights = {name: value for name, value in job.model.items() if name != "head.weight"}
    for flat in (False, True):
        planner = DefaultSavePlanner(flatten_state_dict=flat)
        dcp.save(weights, checkpoint_id=f"dcp{flat}", planner=planner, no_dist=True)
    refused(NeedsInformationError, "order", "source.pt", "out.pt", **options, reference="dcpFalse")
    assert list(states(converted("source.pt", "out.pt", **options, reference="dcpTrue"))) == NAMES


# What real FSDP saved


def test_full_names_of_flat_parameters_get_the_ids_that_fsdp_gave_them() -> None:
    """``use_orig_params=False`` lists the root unit first; ids are in ``model.parameters()`` order all the same."""
    directory = GOLDEN / "torch-2.1" / "f1_flat_full"
    expected = torch.load(directory / "full_old_rekeyed_ids.pt")
    found = converted(directory / "full_old.pt", "out.pt", key_type="id", reference=directory / "model.pt")
    assert list(states(found)) == list(states(expected))
    assert [group for group, _ in groups_of(found)] == [group for group, _ in groups_of(expected)]


def test_every_form_of_real_fsdp_gets_the_ids_of_the_real_optimizer(oracle: Oracle) -> None:
    trained = [name for name, parameter in toy.seeded_model().named_parameters() if parameter.requires_grad]
    in_order = sorted(trained, key=lambda name: not name.startswith("blocks."))

    def require(content: Any, path: str, keys: Any) -> None:
        truth = torch.load(oracle.truth(2, form(path).truth))["optimizer"]["state"]
        require_identical(states(content), {key: truth[name] for key, name in zip(keys, in_order, strict=True)}, path)

    directory, by_id = oracle.checkpoints(2), [list(range(18)), list(range(18, 21))]
    for path in ("f1_full.pt", "f1_flat_full.pt", "f1_ranks", "f1_flat_dcp", "f2_full.pt", "f2_ranks", "f2_dcp"):
        found = converted(directory / path, f"{path}.out.pt", key_type="id")
        require(found, path, range(21))
        assert [group for group, _ in groups_of(found)] == by_id, path
    for path in ("f2_full_ids.pt", "f2_ranks_ids", "f2_dcp_ids"):
        # the frozen bias looks like the last one of the blocks
        refused(NeedsInformationError, "", directory / path, "no.pt", key_type="name")
        named = converted(directory / path, f"{path}.pt", key_type="name", parameters=listed([trained]))
        require(named, path, in_order)
        again = converted(f"{path}.pt", f"{path}.again.pt", key_type="id")
        require(again, path, range(21))
        assert [group for group, _ in groups_of(again)] == by_id, path


def test_a_section_that_is_left_out_still_says_what_the_other_one_holds() -> None:
    """``--only`` chooses what is written, not what is known."""
    job = Job(Model())
    found = converted(save(job.saved()), "optim.pt", only="optim", key_type="name")
    assert found["param_groups"][0]["params"] == NAMES and "model" not in found
    save({"model": {name: job.model[name] for name in NAMES}, "optimizer": found})
    fsdpckpt.convert("source.pt", "ranks", only="model", **RANK_FILES, world_size=2)
    assert sorted(path.name[:5] for path in Path("ranks").glob("*.pt")) == ["model", "model"]

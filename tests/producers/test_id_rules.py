"""Every form that has ids counts them as its loader does: two groups of one shape, a frozen parameter, a shared one.

The loaders are those of the libraries, or call PyTorch exactly as they do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, fully_shard

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")


Saved = tuple[Path, dict[str, torch.Tensor]]


class Net(nn.Module):
    """Five matrices of one shape: one frozen, one that two modules share; a buffer stands before all but the first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 6)
        self.register_buffer("rope", torch.ones(2, 2))
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gate = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens))
        return self.head(self.gate(self.body[1](self.body[0](x))))


def optimizer_of(model: Net) -> torch.optim.Optimizer:
    """As in the recipe of Muon: a group of its own for what is not hidden, the last module first."""
    outer = [*model.gate.parameters(), *model.embed.parameters()]
    inner = [*model.body[1].parameters(), *model.body[0].parameters()]
    return torch.optim.AdamW([{"params": outer, "lr": 0.02}, {"params": inner}], lr=0.01, foreach=False)


def trained(seed: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    optimizer = optimizer_of(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The first moment of each parameter."""
    return {name: optimizer.state[param]["exp_avg"] for name, param in model.named_parameters() if param.requires_grad}


def names_file(path: Path) -> Path:
    path.write_text("\n".join(name for name, _ in Net(0).named_parameters()))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint by name, as ``get_state_dict`` lists it: in the order of the job's own groups."""
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    path = tmp_path_factory.mktemp("ids") / "named.pt"
    torch.save({"model": weights, "optimizer": states}, path)
    return path, truth(model, optimizer)


def loaded(state: Any) -> dict[str, torch.Tensor]:
    model, optimizer = trained(seed=2)
    optimizer.load_state_dict(state)
    return truth(model, optimizer)


# torch.optim: group by group.


def test_a_plain_file_gets_the_ids_of_the_jobs_own_optimizer(saved: Saved, tmp_path: Path) -> None:
    source, expected = saved
    report = fsdpckpt.convert(source, tmp_path / "ids.pt", key_type="id")
    assert identical(loaded(torch.load(tmp_path / "ids.pt")["optimizer"]), expected)
    (rekeyed,) = [note for note in report.notes if note.kind == "rekeyed"]
    assert "the optimizer's own groups, which is not that of" in rekeyed.message and not rekeyed.warning
    assert fsdpckpt.diff(source, tmp_path / "ids.pt").same


def test_the_storage_reader_counts_ids_in_the_same_order(saved: Saved, tmp_path: Path) -> None:
    source, expected = saved
    model, optimizer = trained(seed=2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, storage_reader=fsdpckpt.StorageReader(source, key_type="id"))
    optimizer.load_state_dict(state["optimizer"])
    assert identical(truth(model, optimizer), expected)


def test_names_that_fsdp_sorted_are_counted_in_the_models_order_with_a_warning_and_by_parameters(
    saved: Saved, tmp_path: Path
) -> None:
    source, expected = saved
    model, optimizer = trained()
    names = FullyShardedDataParallel.rekey_optim_state_dict(
        optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
    )
    torch.save({"model": model.state_dict(), "optimizer": names}, tmp_path / "sorted.pt")
    report = fsdpckpt.convert(tmp_path / "sorted.pt", tmp_path / "model.pt", key_type="id")
    (doubt,) = [note for note in report.notes if note.kind == "unproved-order"]
    assert doubt.warning and "--parameters" in doubt.message
    listed = [name for group in torch.load(source)["optimizer"]["param_groups"] for name in group["params"]]
    (tmp_path / "order.txt").write_text("\n".join(listed))
    fsdpckpt.convert(tmp_path / "sorted.pt", tmp_path / "own.pt", key_type="id", parameters=tmp_path / "order.txt")
    assert identical(loaded(torch.load(tmp_path / "own.pt")["optimizer"]), expected)
    assert not identical(loaded(torch.load(tmp_path / "model.pt")["optimizer"]), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_verls_files_are_loaded_as_verl_loads_them(saved: Saved, tmp_path: Path, rank: int) -> None:
    source, expected = saved
    fsdpckpt.convert(source, tmp_path / "verl", flavor="verl", world_size=2, mesh_device="cpu", buffers="rope")
    with as_rank(rank, 2):
        model = Net(3)
        for module in (model.frozen, *model.body, model.gate):
            fully_shard(module)
        fully_shard(model)
        optimizer = optimizer_of(model)
        optimizer.load_state_dict(torch.load(tmp_path / f"verl/optim_world_size_2_rank_{rank}.pt", weights_only=False))
        for name, param in model.named_parameters():
            if param.requires_grad:
                part = expected[name].chunk(2)[rank]
                assert identical(optimizer.state[param]["exp_avg"].to_local(), part), name


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flat_parameters_are_counted_in_the_jobs_own_order(saved: Saved, tmp_path: Path, use_orig_params: bool) -> None:
    source, expected = saved
    options = {"to": "flattened", "world_size": 1, "unit": ["body.*", "gate", "embed"], "key_type": "id"}
    options |= {"buffers": "rope", "exclude": "frozen.*", "use_orig_params": use_orig_params}
    fsdpckpt.convert(source, tmp_path / "flat", **options)  # type: ignore[arg-type]
    states = torch.load(tmp_path / "flat/optim_world_size_1_rank_0.pt")
    listed = [id_ for group in states["param_groups"] for id_ in group["params"]]
    assert listed == list(range(len(listed)))
    order = ["gate.weight", "embed.weight", "body.1.weight", "body.1.bias", "body.0.weight", "body.0.bias"]
    held = torch.cat([states["state"][id_]["exp_avg"].flatten() for id_ in listed])
    assert identical(held, torch.cat([expected[name].flatten() for name in order]))
    found = fsdpckpt.diff(source, tmp_path / "flat")
    assert [entry.key for entry in found.entries if entry.counts and entry.sigil != "="] == ["frozen.weight"]


# Lightning: all parameters of the model.


def by_lightning(states: Any, model: nn.Module, key_type: OptimStateKeyType) -> Any:
    """``optimizer_state`` and ``load_checkpoint`` of FSDPStrategy, ``_rekey_optimizer_state_if_needed`` of Fabric."""
    return FullyShardedDataParallel.rekey_optim_state_dict(states, key_type, model)


def unlike(one: Path, other: Path, **options: Any) -> list[str]:
    """The keys in which the optimizers differ."""
    entries = fsdpckpt.diff(one, other, **options).entries
    return [entry.key for entry in entries if entry.sigil != "=" and entry.section == "optim"]


def moments(states: Any) -> dict[str, torch.Tensor]:
    return {name: entry["exp_avg"] for name, entry in states["state"].items()}


@pytest.mark.parametrize("flavor", ["lightning", "lightning-model-parallel"])
def test_lightning_names_the_ids_of_a_converted_file_as_they_were(saved: Saved, tmp_path: Path, flavor: str) -> None:
    source, expected = saved
    target = tmp_path / "x.ckpt"
    with pytest.raises(NeedsInformationError, match="may be frozen parameters or buffers") as asked:
        fsdpckpt.convert(source, target, flavor=flavor)
    assert asked.value.details == ("rope", "frozen.weight")
    report = fsdpckpt.convert(source, target, flavor=flavor, buffers="rope")
    assert any("their places among all parameters" in note.message for note in report.notes)
    states = torch.load(target)["optimizer_states"][0]
    assert [group["params"] for group in states["param_groups"]] == [[0, 6], [2, 3, 4, 5]]
    assert identical(moments(by_lightning(states, Net(5), OptimStateKeyType.PARAM_NAME)), expected)
    for pair in ((source, target), (target, source)):
        assert unlike(*pair) == []


def saved_by_lightning(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The ids of its groups."""
    weights, states = get_state_dict(model, optimizer)
    ids = by_lightning(states, model, OptimStateKeyType.PARAM_ID)
    torch.save({"state_dict": weights, "optimizer_states": [ids], "pytorch-lightning_version": "2.6.0"}, path)
    return [group["params"] for group in ids["param_groups"]]


def lightning_file(path: Path) -> dict[str, torch.Tensor]:
    model, optimizer = trained()
    assert saved_by_lightning(path, model, optimizer) == [[0, 6], [2, 3, 4, 5]]
    return truth(model, optimizer)


@pytest.mark.parametrize("known_by", ["places", "a list", "a reference of the job, in another order"])
def test_the_ids_of_lightnings_own_file_are_named_by_their_places(known_by: str, saved: Saved, tmp_path: Path) -> None:
    expected = lightning_file(tmp_path / "own.ckpt")
    given: dict[str, Any] = {"places": {}, "a list": {"parameters": names_file(tmp_path / "names.txt")}}
    options = given.get(known_by, {"reference": saved[0]})
    fsdpckpt.convert(tmp_path / "own.ckpt", tmp_path / "named.pt", flavor="plain", key_type="name", **options)
    assert identical(moments(torch.load(tmp_path / "named.pt")["optimizer"]), expected)


@pytest.mark.parametrize("known_by", ["model", "reference", "param_names"])
def test_lightnings_ids_are_places_even_if_they_count_from_zero_without_gaps(tmp_path: Path, known_by: str) -> None:
    model, optimizer = matrices(
        "mzak", param_names=known_by == "param_names"
    )  # one group, in the optimizer's own order
    own = [f"{name}.weight" for name in "mzak"]
    assert saved_by_lightning(tmp_path / "own.ckpt", model, optimizer) == [[0, 1, 2, 3]]
    weights, states = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optimizer": states}, tmp_path / "named.pt")
    reference = tmp_path / "named.pt" if known_by == "reference" else None
    fsdpckpt.convert(tmp_path / "own.ckpt", tmp_path / "x.pt", flavor="plain", key_type="name", reference=reference)
    assert identical(moments(torch.load(tmp_path / "x.pt")["optimizer"]), truth(model, optimizer))
    if known_by != "model":  # ids of torch.optim are those of the optimizer's own order
        fsdpckpt.convert(tmp_path / "own.ckpt", tmp_path / "ids.pt", flavor="plain", reference=reference)
        found = torch.load(tmp_path / "ids.pt")["optimizer"]
        expected = optimizer.state_dict()["state"]
        assert found["param_groups"][0].get("param_names", own) == own
        assert all(identical(found["state"][number]["exp_avg"], expected[number]["exp_avg"]) for number in range(4))


def test_lightnings_ids_count_group_by_group_in_a_plain_file_and_need_no_names_for_it(tmp_path: Path) -> None:
    lightning_file(tmp_path / "own.ckpt")
    report = fsdpckpt.convert(tmp_path / "own.ckpt", tmp_path / "plain.pt", flavor="plain")
    states = torch.load(tmp_path / "plain.pt")["optimizer"]
    assert [group["params"] for group in states["param_groups"]] == [[0, 1], [2, 3, 4, 5]]
    assert any("now they count group by group" in note.message for note in report.notes)
    assert fsdpckpt.diff(tmp_path / "own.ckpt", tmp_path / "plain.pt").same


def test_a_lightning_file_stays_what_it_is_when_nothing_is_rekeyed(tmp_path: Path) -> None:
    lightning_file(tmp_path / "own.ckpt")
    fsdpckpt.convert(tmp_path / "own.ckpt", tmp_path / "half.ckpt", dtype="bfloat16")
    ids = [torch.load(tmp_path / f"{name}.ckpt")["optimizer_states"][0] for name in ("own", "half")]
    assert ids[0]["param_groups"] == ids[1]["param_groups"] and list(ids[0]["state"]) == list(ids[1]["state"])


def test_ids_of_torch_optim_become_lightnings_through_names(tmp_path: Path) -> None:
    """Or not at all: groups of one shape cannot be told apart."""
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ids.pt")
    with pytest.raises(NeedsInformationError):
        fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "x.ckpt", flavor="lightning", buffers="rope")
    named = [{**group, "params": [(name_of(model, param), param) for param in group["params"]]}
             for group in optimizer.param_groups]  # fmt: skip
    again = torch.optim.AdamW(named, foreach=False)
    again.load_state_dict(optimizer.state_dict())
    torch.save({"model": model.state_dict(), "optimizer": again.state_dict()}, tmp_path / "words.pt")
    fsdpckpt.convert(tmp_path / "words.pt", tmp_path / "x.ckpt", flavor="lightning", buffers="rope")
    states = torch.load(tmp_path / "x.ckpt")["optimizer_states"][0]
    expected = truth(model, optimizer)
    assert identical(moments(by_lightning(states, Net(5), OptimStateKeyType.PARAM_NAME)), expected)


def name_of(model: nn.Module, param: Any) -> str:
    return next(name for name, each in model.named_parameters() if each is param)


# diff.


def test_diff_sees_the_order_inside_a_group_and_a_list_from_a_tuple(saved: Saved, tmp_path: Path) -> None:
    source, _ = saved
    for change in (lambda names: [*names[::-1]], tuple):
        content = torch.load(source)
        group = content["optimizer"]["param_groups"][1]
        group["params"] = change(group["params"])
        torch.save(content, tmp_path / "other.pt")
        found = fsdpckpt.diff(source, tmp_path / "other.pt")
        assert [entry.key for entry in found.entries if entry.sigil != "="] == ["param_groups.1.params"]
    content["optimizer"]["param_groups"][1]["params"] = sorted(group["params"])
    content["optimizer"]["param_groups"][0]["params"].sort()
    torch.save(content, tmp_path / "sorted.pt")
    assert fsdpckpt.diff(source, tmp_path / "sorted.pt").same


def matrices(*own: str, param_names: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Four matrices of one shape, none frozen: Lightning's ids have no gaps. ``own``: the optimizer's two groups."""
    torch.manual_seed(4)
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "zamk"})
    by_name = dict(model.named_parameters())
    groups = [[f"{name}.weight" for name in names] for names in own]
    listed: Any = [[(name, by_name[name]) if param_names else by_name[name] for name in names] for names in groups]
    optimizer = torch.optim.AdamW([{"params": params} for params in listed], foreach=False)
    sum(param.mul(torch.randn(4, 4)).sum() for param in by_name.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("own", "known_by"),
    [
        (("mz", "ak"), "their names"),
        (("kmaz",), "their names"),
        (("mzak",), "param_names"),
        (("mzak",), "the order that is given"),
    ],
)
def test_diff_matches_lightnings_ids_without_gaps_by_their_places(
    tmp_path: Path, own: tuple[str, ...], known_by: str
) -> None:
    """With names, or with the ids of torch.optim."""
    model, optimizer = matrices(*own, param_names=known_by == "param_names")
    saved_by_lightning(tmp_path / "own.ckpt", model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": states if known_by == "their names" else optimizer.state_dict()}
    torch.save(content, tmp_path / "other.pt")
    (tmp_path / "order.txt").write_text("\n".join(f"{name}.weight" for name in "mzak"))
    options = {"parameters": tmp_path / "order.txt"} if known_by == "the order that is given" else {}
    for pair in (("own.ckpt", "other.pt"), ("other.pt", "own.ckpt")):
        differing = unlike(*(tmp_path / name for name in pair), **options)
        assert not [key for key in differing if known_by != "param_names" or ".exp_avg" in key]
    if known_by == "their names":
        states["state"]["m.weight"]["exp_avg"] = states["state"]["m.weight"]["exp_avg"] + 1
        torch.save({"model": weights, "optimizer": states}, tmp_path / "changed.pt")
        assert unlike(tmp_path / "changed.pt", tmp_path / "own.ckpt") == ["m.weight.exp_avg"]


def test_diff_does_not_match_places_in_the_model_by_position_where_buffers_make_them_doubtful(tmp_path: Path) -> None:
    """The position in a group is another parameter's: what settles it is asked for, and takes effect."""
    model, optimizer = matrices("mzak")
    saved_by_lightning(tmp_path / "own.ckpt", model, optimizer)
    content = torch.load(tmp_path / "own.ckpt")
    weights = content["state_dict"]
    content["state_dict"] = {"scale": torch.ones(4, 4), **weights}
    torch.save(content, tmp_path / "own.ckpt")
    states = get_state_dict(model, optimizer)[1]
    groups = [{**states["param_groups"][0], "params": names} for names in (["m.weight", "z.weight"], ["a.weight"])]
    torch.save({"optimizer": {"state": states["state"], "param_groups": groups}}, tmp_path / "named.pt")
    with pytest.raises(NeedsInformationError, match="which of these names are buffers") as asked:
        fsdpckpt.diff(tmp_path / "named.pt", tmp_path / "own.ckpt")
    assert "--buffers" in str(asked.value.next_step)
    found = fsdpckpt.diff(tmp_path / "named.pt", tmp_path / "own.ckpt", buffers="scale")
    assert {entry.key for entry in found.entries if entry.sigil == "*"} == {"param_groups.0.params"}


def test_the_storage_reader_reads_lightnings_ids_without_gaps_as_places(tmp_path: Path) -> None:
    model, optimizer = matrices("mzak")
    saved_by_lightning(tmp_path / "own.ckpt", model, optimizer)
    again, fresh = matrices("mzak")
    _, states = get_state_dict(again, fresh)
    for entry in states["state"].values():
        entry["exp_avg"].zero_()
    state = {"model": again.state_dict(), "optimizer": states}
    dcp.load(state, storage_reader=fsdpckpt.StorageReader(tmp_path / "own.ckpt"))
    assert identical(moments(states), truth(model, optimizer))


def test_a_lightning_file_that_became_plain_counts_as_torch_optim_does(tmp_path: Path) -> None:
    """It keeps Lightning's version among its extras: the keys of model and optimizer say how its ids count."""
    expected = lightning_file(tmp_path / "own.ckpt")
    names = names_file(tmp_path / "names.txt")
    fsdpckpt.convert(tmp_path / "own.ckpt", tmp_path / "plain.pt", flavor="plain")
    assert fsdpckpt.inspect(tmp_path / "plain.pt").checkpoint.flavor == "plain"
    fsdpckpt.convert(tmp_path / "plain.pt", tmp_path / "again.pt", dtype="float32")
    assert list(torch.load(tmp_path / "again.pt")) == ["model", "optimizer", "pytorch-lightning_version"]
    with pytest.raises(NeedsInformationError):
        fsdpckpt.convert(tmp_path / "plain.pt", tmp_path / "named.pt", key_type="name", parameters=names)
    names.write_text("embed.weight\ngate.weight\n\n" + "\n".join(n for n in expected if n.startswith("body")))
    fsdpckpt.convert(tmp_path / "plain.pt", tmp_path / "named.pt", key_type="name", parameters=names)
    assert identical(moments(torch.load(tmp_path / "named.pt")["optimizer"]), expected)


def saved_under_ddp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What Lightning's other strategies save: the optimizer's own state dict."""
    states = [optimizer.state_dict()]
    content = {"state_dict": model.state_dict(), "optimizer_states": states, "pytorch-lightning_version": "2.6.0"}
    torch.save(content, path)


def doubts(source: Path, target: Path, **options: Any) -> list[str]:
    report = fsdpckpt.convert(source, target, flavor="plain", key_type="name", **options)
    return [str(note.message) for note in report.notes if note.kind == "unproved-order" and note.warning]


def test_ids_that_ddp_may_have_counted_are_a_warning_that_says_what_settles_it(tmp_path: Path) -> None:
    model, optimizer = matrices("mz", "ak")
    saved_under_ddp(tmp_path / "ddp.ckpt", model, optimizer)
    (doubt,) = doubts(tmp_path / "ddp.ckpt", tmp_path / "guessed.pt")
    assert "DDP saves files that look the same" in doubt and "--parameters FILE" in doubt
    assert not identical(moments(torch.load(tmp_path / "guessed.pt")["optimizer"]), truth(model, optimizer))
    (tmp_path / "order.txt").write_text("m.weight\nz.weight\n\na.weight\nk.weight\n")
    assert doubts(tmp_path / "ddp.ckpt", tmp_path / "settled.pt", parameters=tmp_path / "order.txt") == []
    assert identical(moments(torch.load(tmp_path / "settled.pt")["optimizer"]), truth(model, optimizer))


@pytest.mark.parametrize("own", [("zamk",), ("za", "mk"), ("zm", "ak")])
def test_lightnings_own_ids_are_doubted_only_if_torch_optim_may_have_counted_them(
    tmp_path: Path, own: tuple[str, ...]
) -> None:
    model, optimizer = matrices(*own)
    saved_by_lightning(tmp_path / "own.ckpt", model, optimizer)
    found = doubts(tmp_path / "own.ckpt", tmp_path / "x.pt")
    assert bool(found) is (own == ("za", "mk")), "one group is in the order of the model; 0, 2 and 1, 3 have gaps"
    assert identical(moments(torch.load(tmp_path / "x.pt")["optimizer"]), truth(model, optimizer))


def test_shapes_that_leave_one_way_leave_no_doubt(tmp_path: Path) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model(torch.randn(2, 3)).sum().backward()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}], foreach=False)
    optimizer.step()
    saved_under_ddp(tmp_path / "ddp.ckpt", model, optimizer)
    assert doubts(tmp_path / "ddp.ckpt", tmp_path / "x.pt") == []
    assert identical(moments(torch.load(tmp_path / "x.pt")["optimizer"]), truth(model, optimizer))

"""DeepSpeed's ZeRO: checkpoints that DeepSpeed saved, and every way in which files can contradict each other."""

from __future__ import annotations

import copy as copy_module
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, UsageError
from fsdpckpt.ir.account import Rule
from fsdpckpt.readers.deepspeed import DeepSpeedReader
from fsdpckpt.readers.deepspeed.partitions import PartitionError, partitions_of_groups, partitions_of_params
from fsdpckpt.testing import WEIGHTS, ReaderContract
from tests.golden.deepspeed.make import Net
from tests.makers import Change, Make, add, add_copy, copied, edit, files, lose, move, put
from tests.oracle.compare import identical, require_identical
from tests.readers.contents import held, opened
from tests.readers.junk import save
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsupported

GOLDEN = Path(__file__).parent.parent / "golden" / "deepspeed"
ALL = sorted(path.name for path in GOLDEN.iterdir() if (path / "latest").exists())
each = pytest.mark.parametrize("name", ALL)
RANKS = {name: len(list((GOLDEN / name / "global_step3").glob("*optim_states.pt"))) for name in ALL}


def truth(name: str) -> Any:
    return torch.load(GOLDEN / name / "truth.pt")


def copy(name: str, tmp_path: Path) -> Path:
    """A checkpoint to change, without the truth."""
    copied = shutil.copytree(GOLDEN / name, tmp_path / name)
    (copied / "truth.pt").unlink()
    return copied


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """One full file of each, converted once."""
    made: dict[str, Any] = {}

    def convert(name: str) -> Any:
        if name not in made:
            source = copy(name, tmp_path_factory.mktemp("zero"))
            fsdpckpt.convert(str(source), str(source.parent / "full.pt"))
            made[name] = torch.load(source.parent / "full.pt")
        return made[name]

    return convert


def require_gathered(state: Any, name: str) -> None:
    """Every weight and state is what DeepSpeed gathers, in the names, shapes and order of the module."""
    for key, expected in truth(name)["params"].items():
        assert identical(state["model"][key].flatten(), expected.pop("weight")), key
        for moment, value in expected.items():
            assert identical(state["optimizer"]["state"][key][moment].flatten(), value), (key, moment)
            assert state["optimizer"]["state"][key][moment].shape == state["model"][key].shape
    shapes = {key: value.shape for key, value in Net().state_dict().items()}
    assert {key: value.shape for key, value in state["model"].items()} == shapes
    assert identical(state["model"]["head.weight"], state["model"]["embed.weight"])


@each
def test_every_value_is_what_deepspeed_gathers(name: str, full: Callable[[str], Any]) -> None:
    state, net = full(name), Net()
    require_gathered(state, name)
    trained = [key for key, param in net.named_parameters() if param.requires_grad]
    groups = [group["params"] for group in state["optimizer"]["param_groups"]]
    assert groups == [
        [key for key in trained if net.get_parameter(key).ndim > 1],
        [key for key in trained if net.get_parameter(key).ndim <= 1],
    ]


@pytest.mark.parametrize("name", ["zero2-fp32", "zero2-round-robin", "zero3-fp32"])
def test_training_goes_on_with_the_same_losses(name: str, full: Callable[[str], Any], tmp_path: Path) -> None:
    """Without DeepSpeed, on one process that averages the gradients of all ranks."""
    ranks = RANKS[name]
    fsdpckpt.convert(str(copy(name, tmp_path)), str(tmp_path / "ids.pt"), key_type="id")
    state = torch.load(tmp_path / "ids.pt")
    net = Net()
    net.load_state_dict(state["model"])
    trained = [param for param in net.parameters() if param.requires_grad]
    groups = [[param for param in trained if param.ndim > 1], [param for param in trained if param.ndim <= 1]]
    optimizer = torch.optim.AdamW([{"params": params} for params in groups])
    optimizer.load_state_dict(state["optimizer"])
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(ranks)]
    for generator in generators:
        for _ in range(3):
            torch.randint(0, 13, (2, 5), generator=generator)
    losses: list[list[float]] = [[] for _ in generators]
    for step in range(3):
        optimizer.zero_grad()
        for rank, generator in enumerate(generators):
            tokens = torch.randint(0, 13, (2, 5), generator=generator)
            loss = torch.nn.functional.cross_entropy(net(tokens).view(-1, 13), tokens.view(-1))
            losses[rank].append(loss.item())
            (loss / ranks).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.9 ** (4 + step)
    assert torch.allclose(torch.tensor(losses), torch.tensor(truth(name)["losses"]), rtol=1e-5, atol=0)


def test_the_copies_that_the_model_computed_with_are_the_weights_cast(full: Callable[[str], Any]) -> None:
    """So that no option is needed to choose between them. The module's file is read inertly, by a conversion."""
    with fsdpckpt.open(str(GOLDEN / "zero1-bf16" / "global_step3" / "mp_rank_00_model_states.pt")) as module:
        copies = {name.removeprefix("module."): module[name].torch() for name in module if name in Net().state_dict()}
    assert {copies[name].dtype for name in truth("zero1-bf16")["params"]} == {torch.bfloat16}
    for name in truth("zero1-bf16")["params"]:
        assert identical(copies[name], full("zero1-bf16")["model"][name].bfloat16()), name


def test_a_run_reads_the_step_that_latest_names(tmp_path: Path) -> None:
    source = copy("zero2-fp32", tmp_path)
    shutil.copytree(source / "global_step3", source / "global_step2")
    checkpoint = opened(source)
    assert checkpoint.origin.directory == str(source)
    assert {Path(file.path).parent.name for file in checkpoint.files} == {"global_step3"}
    assert any("global_step2" in note.message for note in checkpoint.notes)
    assert opened(source / "global_step2").flavor == "deepspeed"


@pytest.mark.parametrize("sharded", [False, True])
def test_what_zero_to_fp32_wrote_into_the_run_is_an_export_and_a_model_where_it_is_alone(
    sharded: bool, full: Callable[[str], Any], tmp_path: Path
) -> None:
    """One file or, above ``max_shard_size``, several and an index."""
    run = copy("zero2-fp32", tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    model = dict(full("zero2-fp32")["model"])
    if sharded:
        names = list(model)
        files = {f"pytorch_model-0000{number}-of-00002.bin": names[number - 1 :: 2] for number in (1, 2)}
        for file, of_file in files.items():
            torch.save({name: model[name] for name in of_file}, alone / file)
        weight_map = {name: file for file, of_file in files.items() for name in of_file}
        (alone / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        torch.save(model, alone / "pytorch_model.bin")
    shutil.copytree(alone, run, dirs_exist_ok=True)
    found = fsdpckpt.inspect(run).checkpoint
    assert found.optim is not None and found.world_size == 2
    account = found.ledger.account.of(next(alone.glob("*.bin")).name)
    assert account is not None and account.detail == Rule.EXPORT
    assert fsdpckpt.diff(alone, run, only="model").same


def test_what_the_training_kept_beside_is_an_extra_and_the_weights_are_the_masters(full: Callable[[str], Any]) -> None:
    state = full("zero1-bf16")
    assert (state["epoch"], state["global_steps"], state["lr_scheduler"]["last_epoch"]) == (3, 3, 3)
    assert state["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}
    for name, said in (("zero1-bf16", ["not the bfloat16 copies"]), ("zero2-fp32", [])):
        notes = [note.message for note in opened(GOLDEN / name / "global_step3").notes if note.kind == "master-weights"]
        assert len(notes) == len(said) and all(text in note for text, note in zip(said, notes, strict=True))


def test_what_one_rank_alone_kept_is_not_every_ranks(tmp_path: Path) -> None:
    files = _old_files(3)
    own = {"path": "/a", "client": {"step": 3, "rank": 0}, "loss": torch.ones(2)}, {"client": {"step": 3}, "host": "b"}
    for rank, extras in enumerate(own):
        files[OTHER.format(rank, "model")] |= extras
        files[OTHER.format(rank, "optim")]["optimizer_state_dict"][f"of_{rank}"] = rank
    save(files, tmp_path / "run")
    found = opened(tmp_path / "run")
    assert found.extra == {"step": 3, "client": {"step": 3}}
    expected = [{"step": 3, **extras, f"of_{rank}": rank} for rank, extras in enumerate(own)]
    assert [held(extras, found.files) for extras in found.rank_extra] == [held(extras, ()) for extras in expected]
    fsdpckpt.convert(
        tmp_path / "run", tmp_path / "ranks", to="sharded", container="torch", world_size=2, flavor="plain"
    )
    written = [torch.load(tmp_path / "ranks" / f"extra_state_world_size_2_rank_{rank}.pt") for rank in range(2)]
    assert [held(extras, ()) for extras in written] == [held(extras, ()) for extras in expected]


def test_what_is_left_out_of_every_ranks_file_is_said_once(tmp_path: Path) -> None:
    (note,) = [note for note in opened(copy("zero3-bf16", tmp_path)).notes if note.kind == "dropped"]
    assert note.message.endswith("_optim_states.pt and 2 more files are left out: ds_id")


def test_the_trainers_own_files_go_to_fsdp_and_to_deepspeed_and_back(tmp_path: Path) -> None:
    source = copy("zero2-fp32", tmp_path)
    own = {"trainer_state.json": "{}", "training_args.bin": "x", "config.json": "{}"}
    for name, content in {**own, "zero_to_fp32.py": "raise SystemExit\n"}.items():
        (source / name).write_text(content)
    torch.save({"last_epoch": 3}, source / "scheduler.pt")
    for rank in range(2):
        random = {"python": (3, (1, rank), None), "cpu": torch.arange(4, dtype=torch.uint8) + rank}
        torch.save(random, source / f"rng_state_{rank}.pth")
    assert opened(source).flavor == "trainer"
    fsdp, universal, back = (tmp_path / name for name in ("fsdp", "universal", "back"))
    fsdpckpt.convert(source, fsdp, world_size=3)
    fsdpckpt.convert(source, universal, flavor="deepspeed-universal")
    fsdpckpt.convert(universal, back, flavor="trainer", world_size=2)
    for directory in (fsdp, universal, back):
        names = {path.name for path in directory.iterdir()}
        assert {*own, "scheduler.pt"} <= names and any(name.startswith("rng_state") for name in names)
        assert not names & {"latest", "global_step3", "zero_to_fp32.py"}
        assert directory == universal or {"pytorch_model_fsdp_0", "optimizer_0"} <= names
    assert (universal / "latest_universal").read_text() == "global_step3_universal"
    compared = fsdpckpt.diff(str(source / "global_step3"), str(back))
    assert not [entry.key for entry in compared.entries if entry.sigil != "=" and entry.section != "extra"]


def test_a_checkpoint_of_accelerate_with_deepspeed_is_accelerates(tmp_path: Path) -> None:
    """Its directory of the step is called pytorch_model, which load_state asks for."""
    source = copy("zero2-fp32", tmp_path)
    (source / "global_step3").rename(source / "pytorch_model")
    (source / "latest").write_text("pytorch_model")
    torch.save({"last_epoch": 3}, source / "scheduler.bin")
    for rank in range(2):
        state = {
            "step": 3,
            "random_state": (3, (1, rank), None),
            "torch_manual_seed": torch.arange(4, dtype=torch.uint8),
        }
        torch.save(state, source / f"random_states_{rank}.pkl")
    assert opened(source).flavor == "accelerate"
    fsdpckpt.convert(str(source), str(tmp_path / "fsdp"), world_size=3)
    names = {path.name for path in (tmp_path / "fsdp").iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0", "scheduler.bin", "random_states_2.pkl"} <= names
    assert not names & {"latest", "pytorch_model"}
    report = fsdpckpt.convert(str(source), str(tmp_path / "universal"), flavor="deepspeed-universal")
    assert not [note for note in report.notes if "random_states differs" in note.message]  # each rank's file is there
    written = torch.load(tmp_path / "universal" / "pytorch_model" / "mp_rank_00_model_states.pt", weights_only=False)
    assert not {"random_states", "scheduler"} & written.keys()
    names = {path.name for path in (tmp_path / "universal").iterdir()}
    assert names == {
        *("pytorch_model", "latest_universal", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"),
        "fsdpckpt.json",
    }
    assert (tmp_path / "universal" / "latest_universal").read_text() == "pytorch_model"


@pytest.mark.parametrize(
    "text", ["../zero2-fp32/global_step3", "", ".", "..", "global_step4", "\0", "x" * 2000, "latest"]
)
def test_a_last_step_that_is_none_is_not_followed(text: str, tmp_path: Path) -> None:
    source = copy("zero2-fp32", tmp_path)
    (source / "latest").write_text(text)
    assert {Path(file.path).parent.name for file in opened(source).files} == {"global_step3"}  # there is only one


def step(name: str, *changes: Change, given: str = "") -> Make:
    """A maker of the directory of a step that DeepSpeed saved, changed."""
    return copied(GOLDEN / name / "global_step3", *changes, given=given)


def saved_before(name: str, left: str) -> Change:
    """An earlier save left these files in the directory."""
    return add(GOLDEN / name / "global_step3", left)


def old_files(stage: int, *changes: Callable[[dict[str, Any]], object]) -> Make:
    """A maker of ``_old_files``, changed."""
    return files(lambda: changed_files(stage, *changes))


def changed_files(stage: int, *changes: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    made = _old_files(stage)
    for change in changes:
        change(made)
    return made


def of_ranks(
    change: Callable[[dict[str, Any], int], object], kind: str = "optim"
) -> Callable[[dict[str, Any]], object]:
    """Changes what each rank has; ``change`` is given that and the rank."""

    def change_all(made: dict[str, Any]) -> None:
        for rank in range(2):
            content = made[OTHER.format(rank, kind)]
            change(content["optimizer_state_dict"] if kind == "optim" else content, rank)

    return change_all


def after_steps(form: Callable[[int], Any]) -> Callable[[dict[str, Any]], object]:
    """The ranks' optimizers have made 1,200 and 1,300 steps."""
    return of_ranks(
        lambda states, rank: states["optimizer_state_dict"]["state"][0].update(step=form(1200 + 100 * rank))
    )


def frozen(**other: Any) -> Callable[[dict[str, Any]], object]:
    """The first rank has another fragment, or shape, of the frozen parameter."""
    return lambda made: [made[MODEL_0][f"frozen_param_{field}"].update(f=value) for field, value in other.items()]


def shapes_of(entry: dict[Any, Any]) -> Callable[[dict[str, Any]], object]:
    """The first rank has other shapes of its parameters."""
    return lambda made: made[MODEL_0].update(param_shapes=[entry])


def swapped_out(states: dict[str, Any], _: int) -> None:
    """What DeepSpeed 0.19's code saves of an optimizer on NVMe: empty flat tensors (not run with the library)."""
    states["fp32_flat_groups"] = [torch.zeros(0)]
    states["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.zeros(0)


def shorter_moment(states: dict[str, Any], _: int) -> None:
    of_parameter = states["optimizer_state_dict"]["state"][0]
    of_parameter["exp_avg"] = of_parameter["exp_avg"][:-1]


def two_states(states: dict[str, Any], _: int) -> None:
    states["base_optimizer_state"] = [states["base_optimizer_state"]["state"][0]] * 2


def one_more(states: dict[str, Any], rank: int) -> None:
    """The second rank has another flat tensor, with its states."""
    states["single_partition_of_fp32_groups"] *= 1 + rank
    states["base_optimizer_state"]["state"] |= {rank: states["base_optimizer_state"]["state"][0]}


def groups_of_module(count: int) -> Change:
    more = {"more": torch.Size([2])}
    return edit(MODEL, lambda module: module.update(param_shapes=[*module["param_shapes"], more][:count]))


BF16, OTHER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_{}_states.pt"
MODEL, SECOND = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"
OPTIM_0, OPTIM_1, MODEL_0, MODEL_1 = (OTHER.format(rank, kind) for kind in ("optim", "model") for rank in range(2))
TWO_SAVES = "contains the files of 2 DeepSpeed saves"
ONE_PART = ("one rank's part", "next: give the directory with the files of all ranks")
AS_MODEL = f"fsdpckpt convert DIR/{MODEL} DST --only model"

REFUSALS = (
    incomplete("a rank's states are missing", step("zero1-bf16", lose(BF16.format(1))), BF16.format(1)),
    incomplete("the module states are missing", step("zero1-bf16", lose(MODEL)), MODEL),
    incomplete("a rank's module states are missing", step("zero3-bf16", lose(MODEL_1)), MODEL_1),
    # The names of the others do not say how many ranks there are, the files do.
    *(
        incomplete(f"the last rank's files of {name} are missing", step(name, lose(f"*zero_pp_rank_{rank}_*")), file)
        for name, rank, file in (
            ("zero1-bf16", 2, BF16.format(2)),
            ("zero2-fp32", 1, OPTIM_1),
            ("zero1-grad-fp32", 1, BF16.format(1)),
            ("zero3-bf16", 2, OTHER.format(2, "optim")),
        )
    ),
    incomplete("a rank is missing, and the model is whole", step("zero1-bf16", lose(BF16.format(1))), AS_MODEL),
    incomplete("so it is in float16", step("zero2-fp16", lose(OPTIM_1)), AS_MODEL),
    incomplete("under ZeRO 3 it is not", step("zero3-fp32", lose(OPTIM_1)), omits=("--only model",)),
    # ZeRO 3 leaves empty tensors in a rank's module states, tensor parallelism a part of each.
    incomplete("one rank's module states", step("zero3-fp32", put(SECOND, ""), given=MODEL_0), *ONE_PART),
    incomplete("those of a tensor-parallel rank", step("zero3-fp32", move(MODEL_0, SECOND), given=SECOND), *ONE_PART),
    incomplete("those of the first", step("zero3-fp32", move(MODEL_0, MODEL), put(SECOND, ""), given=MODEL), *ONE_PART),
    incomplete("one rank's states", step("zero1-bf16", given=BF16.format(1)), "one rank's part"),
    corrupt(
        "a later save of two ranks left the file of the third",
        step("zero1-grad-fp32", saved_before("zero1-bf16", "*rank_2*")),
        TWO_SAVES,
        f"- saved by 2 ranks: {BF16.format('{0..1}')}, {MODEL}\n  - saved by 3 ranks: {BF16.format(2)}\n",
    ),
    corrupt(
        "the module states are those of three ranks",
        step("zero1-grad-fp32", saved_before("zero1-bf16", "mp_*")),
        TWO_SAVES,
        f"- saved by 2 ranks: {BF16.format('{0..1}')}\n  - saved by 3 ranks: {MODEL}\n",
    ),
    corrupt(
        "bfloat16 and float32",
        step("zero2-fp32", saved_before("zero1-bf16", "bf16*")),
        TWO_SAVES,
        f"- saved in bfloat16: {BF16.format('{0..2}')}\n",
        f"- saved in float16 or float32: {OTHER.format('{0..1}', 'optim')}\n",
        "or leave them out with --ignore-file GLOB",
    ),
    corrupt(
        "the module states of ZeRO 2 beside ZeRO 3",
        step("zero3-bf16", saved_before("zero2-fp32", "mp_*")),
        TWO_SAVES,
        f"- saved with ZeRO 1 or 2: {MODEL}\n  - saved with ZeRO 3: {OTHER.format('{0..2}', 'model')}\n",
    ),
    corrupt(
        "a rank's states of ZeRO 2 among those of ZeRO 3",
        step("zero3-fp32", saved_before("zero2-fp32", "*rank_1*optim*")),
        TWO_SAVES,
        f"- saved with ZeRO 3: {OTHER.format('{0,2}', 'optim')}, {OTHER.format('{0..2}', 'model')}\n",
        f"- saved with ZeRO 1 or 2: {OPTIM_1}\n",
    ),
    corrupt(
        "a hole among the ranks of an earlier save is no missing file",
        step("zero1-grad-fp32", saved_before("zero1-bf16", "*rank_2*"), lose(BF16.format(1))),
        TWO_SAVES,
        f"- saved by 2 ranks: {BF16.format(0)}, {MODEL}\n  - saved by 3 ranks: {BF16.format(2)}\n",
    ),
    corrupt(
        "files of more ranks than an earlier DeepSpeed recorded",
        old_files(2, lambda made: made[MODEL].update(dp_world_size=1)),
        f"- saved by 1 rank: {OPTIM_0}, {MODEL}\n  - saved by more ranks: {OPTIM_1}\n",
    ),
    *(
        corrupt(
            f"param_shapes of {entry}", old_files(3, shapes_of(entry)), f"{MODEL_0}: param_shapes has {says} with an"
        )
        for entry, says in (({"w": None}, "'w'"), ({"w": [-3]}, "'w'"), ({7: [3, 5]}, "7"))
    ),
    *(
        corrupt(f"a frozen parameter that is {name}", old_files(3, frozen(**other)), what)
        for name, what, other in (
            ("a matrix", "parameter f is not a flat tensor with a shape", {"fragments": torch.ones(1, 1)}),
            ("a number", "parameter f is not a flat tensor with a shape", {"fragments": 3}),
            ("of no shape", "parameter f is not a flat tensor with a shape", {"shapes": None}),
            ("too large", "f does not fit into the flat tensors, which have [1] elements", {"shapes": [3, 7]}),
        )
    ),
    *(
        corrupt(
            f"the optimizers of two steps, as {form.__name__}",
            old_files(3, after_steps(form)),
            f"- saved after 1,200 steps of the optimizer: {OPTIM_0}\n",
            f"- saved after 1,300 steps of the optimizer: {OPTIM_1}\n",
        )
        for form in (int, lambda number: torch.tensor(float(number)))
    ),
    corrupt(
        "the module states of two steps",
        old_files(3, of_ranks(lambda content, rank: content.update(global_steps=1200 + 100 * rank), "model")),
        f"- saved at step 1,200: {MODEL_0}\n  - saved at step 1,300: {MODEL_1}\n",
    ),
    corrupt(
        "groups missing", step("zero1-grad-fp32", groups_of_module(1)), "2 flat tensors, and the module has 1 group"
    ),
    corrupt(
        "a group more", step("zero1-grad-fp32", groups_of_module(3)), "2 flat tensors, and the module has 3 groups"
    ),
    corrupt("states more", old_files(2, of_ranks(two_states)), "it has the states of 2 of 1 flat tensors"),
    corrupt("flat tensors more", old_files(2, of_ranks(one_more)), "it has 1 flat tensor, and other ranks others"),
    unsupported(
        "states that are not split like their weights",
        old_files(3, of_ranks(shorter_moment)),
        "the state exp_avg is not split like the weights",
        "expected 8 elements, found shape [7]",
    ),
    corrupt("empty flat tensors", old_files(3, of_ranks(swapped_out)), "flat tensors"),
    unsupported(
        "an optimizer on NVMe",
        files(
            lambda: {
                "offloaded_tensors/rank0/0_0.tensor.swp": bytes(1 << 20),
                **changed_files(3, of_ranks(swapped_out)),
            }
        ),
        "NVMe",
        "safe_get_full_optimizer_state",
    ),
    unsupported("stages", step("zero1-bf16", add_copy(MODEL, "layer_01-model_00-model_states.pt")), "pipeline stages"),
    unsupported("experts", step("zero1-bf16", add_copy(MODEL, f"layer_0_expert_3_{MODEL}")), "experts"),
)


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


@pytest.mark.parametrize("name", ["zero2-fp16", "zero1-bf16"])
def test_without_an_optimizer_file_the_weights_are_taken_from_the_module_states(name: str, tmp_path: Path) -> None:
    """As the refusal of the whole says."""
    step(name)(tmp_path / "step")
    fsdpckpt.convert(tmp_path / "step" / MODEL, tmp_path / "weights.pt", only="model")
    module = torch.load(tmp_path / "step" / MODEL, weights_only=False)["module"]
    found = torch.load(tmp_path / "weights.pt")
    require_identical(found, module)


def test_the_files_of_one_of_two_saves_can_be_left_out(tmp_path: Path) -> None:
    step("zero2-fp32", add(GOLDEN / "zero1-bf16" / "global_step3", "bf16*"))(tmp_path / "step")
    fsdpckpt.convert(tmp_path / "step", tmp_path / "full.pt", ignore_file=["bf16_*"])
    assert fsdpckpt.diff(tmp_path / "full.pt", GOLDEN / "zero2-fp32").same


def test_as_many_files_as_ranks_were_recorded_are_one_save_and_small_flat_tensors_need_no_nvme(tmp_path: Path) -> None:
    old_files(2, lambda made: made[MODEL].update(dp_world_size=2))(tmp_path / "recorded")
    assert opened(tmp_path / "recorded").world_size == 2
    old_files(3)(tmp_path / "small")
    (tmp_path / "small" / "offloaded_tensors" / "rank0").mkdir(parents=True)
    assert opened(tmp_path / "small").model is not None


def test_parts_that_lie_elsewhere_than_their_file_says_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class fragment_address:  # noqa: N801  # as DeepSpeed calls it
        numel: int
        start: int

    fragment_address.__module__, fragment_address.__qualname__ = "deepspeed.utils.tensor_fragment", "fragment_address"
    module = ModuleType("deepspeed.utils.tensor_fragment")
    module.fragment_address = fragment_address  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for start in (0, 1):
        made = _old_files(2)
        for rank, numel in enumerate((8, 7)):
            states = made[OTHER.format(rank, "optim")]["optimizer_state_dict"]
            states["param_slice_mappings"] = [{"w": fragment_address(numel - start * rank, start * rank)}]
        save(made, tmp_path / str(start))
    assert opened(tmp_path / "0").model is not None
    with pytest.raises(SourceCorruptError, match="not where the shapes and the number of ranks put them"):
        opened(tmp_path / "1")


def _old_files(stage: int, parts: Sequence[torch.Tensor] = (torch.arange(8.0),) * 2) -> dict[str, Any]:
    """The files of 2 ranks with one weight, as plain dicts. ``parts``: what each has of the flat tensor."""
    part = torch.arange(8.0)
    module = {"module": {"w": part[:0], "mask": part + 1}, "param_shapes": [{"w": [3, 5]}], "step": 3}
    module |= {"frozen_param_shapes": {"f": [2]}, "frozen_param_fragments": {"f": torch.ones(1)}, "shared_params": {}}
    names = [MODEL_0, MODEL_1] if stage == 3 else [MODEL]
    files: dict[str, Any] = {name: copy_module.deepcopy(module) for name in names}
    for name, own in zip((OPTIM_0, OPTIM_1), parts, strict=True):
        base = {"state": {0: {"step": 3, "exp_avg": own / 2}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        states: dict[str, Any] = {"optimizer_state_dict": base, "fp32_flat_groups": [own]}
        if stage == 2:
            states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [own], "group_paddings": [0]}
            states["param_alignment_paddings"] = [[0]]
        files[name] = {"optimizer_state_dict": copy_module.deepcopy({**states, "zero_stage": stage})}
    return files


@pytest.mark.parametrize(("flavor", "file"), [("trainer", "scheduler.pt"), ("accelerate", "scheduler.bin")])
def test_the_schedule_is_where_fsdp_jobs_look_for_it(flavor: str, file: str, tmp_path: Path) -> None:
    """DeepSpeed keeps it in its own file; without it the Trainer would start with a new optimizer."""
    source = copy("zero2-fp32", tmp_path)
    report = fsdpckpt.convert(str(source), str(tmp_path / "out"), flavor=flavor, world_size=2)
    expected = torch.load(source / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)["lr_scheduler"]
    schedule = torch.load(tmp_path / "out" / file, weights_only=True)
    assert schedule == expected
    assert schedule["last_epoch"] == 3
    said = [note.message for note in report.notes]
    assert any(message.startswith(f"{file} is the state of the source's LR scheduler") for message in said)
    assert any("accelerate will count one step for each process" in message for message in said) is (
        flavor == "accelerate"
    )
    assert not any(f"has no {file}" in message or "lr_scheduler" in message for message in said)
    fsdpckpt.convert(str(source), str(tmp_path / "weights"), flavor=flavor, world_size=2, only="model")
    assert not (tmp_path / "weights" / file).exists()


def test_a_schedule_of_deepspeeds_own_is_left_out_and_said(tmp_path: Path) -> None:
    """Its WarmupLR keeps one counter, which no scheduler of torch loads."""
    source = copy("zero2-fp32", tmp_path)
    path = source / "global_step3" / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    torch.save({**states, "lr_scheduler": {"last_batch_iteration": 2}}, path)
    report = fsdpckpt.convert(str(source), str(tmp_path / "out"), flavor="trainer", world_size=2)
    assert not (tmp_path / "out" / "scheduler.pt").exists()
    said = " ".join(note.message for note in report.notes)
    assert "the target has no scheduler.pt" in said
    assert "lr_scheduler" in said


def test_an_optimizer_with_one_group_gets_the_trainers_two(tmp_path: Path) -> None:
    names = {"w.weight": torch.randn(3, 5), "w.bias": torch.randn(3), "norm.weight": torch.randn(5)}
    group = {"lr": 0.1, "weight_decay": 0.5, "params": list(names)}
    states = {name: {"step": torch.tensor(3.0), "exp_avg": value / 2} for name, value in names.items()}
    state = {"model": names, "optimizer": {"state": states, "param_groups": [group]}}
    torch.save(state, tmp_path / "one.pt")
    report = fsdpckpt.convert(str(tmp_path / "one.pt"), str(tmp_path / "trainer"), flavor="trainer", world_size=2)
    assert any("--no-weight-decay standard" in note.message for note in report.notes)
    report = fsdpckpt.convert(
        str(tmp_path / "one.pt"), str(tmp_path / "two"), flavor="trainer", to="full", no_weight_decay="standard"
    )
    assert not any("--no-weight-decay" in note.message for note in report.notes)
    optimizer = torch.load(tmp_path / "two" / "optimizer.bin")
    assert optimizer["param_groups"] == [
        {"lr": 0.1, "weight_decay": 0.5, "params": ["w.weight"]},
        {"lr": 0.1, "weight_decay": 0.0, "params": ["w.bias", "norm.weight"]},
    ]
    assert optimizer["state"].keys() == names.keys()


def _schedulers(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
    parts = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        torch.optim.lr_scheduler.ConstantLR(optimizer),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [10])


@pytest.mark.parametrize(
    ("flavor", "file", "place"),
    [
        ("trainer", "two/scheduler.pt", ()),
        ("accelerate", "two/scheduler.bin", ()),
        ("lightning", "two.ckpt", ("lr_schedulers", 0)),
        ("plain", "two.pt", ("lr_schedulers", 0)),
    ],
)
def test_the_lr_scheduler_of_two_groups_has_two_learning_rates(
    flavor: str, file: str, place: tuple[Any, ...], tmp_path: Path
) -> None:
    model, names = torch.nn.Linear(3, 2), ["weight", "bias"]
    one, two = (
        torch.optim.SGD(groups, lr=0.1)
        for groups in (model.parameters(), [{"params": [each]} for each in model.parameters()])
    )
    group = {**one.param_groups[0], "params": names}
    optimizer = {
        "state": {name: {"momentum_buffer": value} for name, value in model.state_dict().items()},
        "param_groups": [group],
    }
    schedule, expected = _schedulers(one).state_dict(), _schedulers(two).state_dict()
    others = {"pytorch-lightning_version": "2.0.0", "epoch": 0, "global_step": 0, "lr_schedulers": [schedule]}
    source, target = tmp_path / "one.ckpt", tmp_path / Path(file).parts[0]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer], **others}, source)

    def require_two(path: Path) -> None:
        written = torch.load(path)
        for step in place:
            written = written[step]
        assert written == expected

    fsdpckpt.convert(source, target, flavor=flavor, to="full", no_weight_decay="standard")
    require_two(tmp_path / file)
    if target.is_dir():  # a file of the framework's own, which is copied otherwise
        torch.save(optimizer, target / "optimizer.bin")
        torch.save(schedule, tmp_path / file)
        torch.save({}, target / {"trainer": "rng_state.pth", "accelerate": "random_states_0.pkl"}[flavor])
        (target / "fsdpckpt.json").unlink()
        fsdpckpt.convert(target, tmp_path / "again", flavor=flavor, to="full", no_weight_decay="standard")
        require_two(tmp_path / "again" / Path(file).name)


@pytest.mark.parametrize("rule", ["standard", "*"])
def test_one_group_of_ids_is_not_divided_by_globs_that_match_digits(rule: str, tmp_path: Path) -> None:
    names = {"w.weight": torch.randn(3, 5), "w.bias": torch.randn(3)}
    states = {number: {"exp_avg": value / 2} for number, value in enumerate(names.values())}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "weight_decay": 0.5, "params": [0, 1]}]}
    torch.save({"model": names, "optimizer": optimizer}, tmp_path / "ids.pt")
    with pytest.raises(UsageError, match="is keyed by ids") as error:
        fsdpckpt.convert(str(tmp_path / "ids.pt"), str(tmp_path / "out.pt"), no_weight_decay=rule)
    assert "--key-type name" in str(error.value.next_step)
    fsdpckpt.convert(str(tmp_path / "ids.pt"), str(tmp_path / "names.pt"), key_type="name")
    fsdpckpt.convert(str(tmp_path / "names.pt"), str(tmp_path / "out.pt"), no_weight_decay="standard")
    groups = torch.load(tmp_path / "out.pt")["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["w.weight"], ["w.bias"]]


class TestPartitions:
    """The arithmetic, against flat tensors that are really cut."""

    shapes = ({"a": (3, 5), "b": (), "c": (7,), "d": (0, 4)}, {"e": (11,)})

    @pytest.mark.parametrize("ranks", [1, 2, 3, 8, 40])
    @pytest.mark.parametrize("gaps", [[[], []], [[1, 3, 0, 2], [0]]])
    def test_zero_2(self, ranks: int, gaps: list[list[int]]) -> None:
        groups = [[list(range(100 * i, 100 * i + prod(shape))) for i, shape in enumerate(group.values())]
                  for group in self.shapes]  # fmt: skip
        flats = []
        for group, padding in zip(groups, gaps, strict=True):
            flat: list[int | None] = []
            for values, gap in zip(group, padding or [0] * len(group), strict=True):
                flat += [*values, *[None] * gap]
            flats.append(flat + [None] * (-len(flat) % (2 * ranks)))
        lengths = [[len(flat) // ranks for flat in flats] for _ in range(ranks)]
        placed = partitions_of_groups(self.shapes, gaps, lengths)
        for number, (flat, shapes) in enumerate(zip(flats, self.shapes, strict=True)):
            held: dict[str, list[int | None]] = {name: [None] * prod(shape) for name, shape in shapes.items()}
            for rank in range(ranks):
                part = flat[rank * lengths[0][number] : (rank + 1) * lengths[0][number]]
                for one in placed.slices[rank][number]:
                    held[one.name][one.begin : one.begin + one.count] = part[one.at : one.at + one.count]
            assert list(held.values()) == groups[number]

    @pytest.mark.parametrize("ranks", [1, 2, 3, 8, 40])
    def test_zero_3(self, ranks: int) -> None:
        names = {name: prod(shape) for group in self.shapes for name, shape in group.items()}
        parts = {name: -(-numel // ranks) for name, numel in names.items()}
        ends = [parts["a"] + parts["b"], parts["c"] + parts["d"] + parts["e"]]
        placed = partitions_of_params(self.shapes, [ends] * ranks)
        for rank in range(ranks):
            at = 0
            for one in (one for group in placed.slices[rank] for one in group):
                assert one.begin == min(rank * parts[one.name], names[one.name])
                assert one.begin + one.count == min((rank + 1) * parts[one.name], names[one.name])
                assert one.at == (at if at < ends[0] or one.name in "ab" else at - ends[0])
                at += parts[one.name]

    def test_lengths_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(PartitionError):
            partitions_of_groups(self.shapes, [[], []], [[11, 6], [11, 5]])
        with pytest.raises(PartitionError):
            partitions_of_groups(self.shapes, [[], []], [[11, 6]])
        for lengths in ([[22], [22]], [[22, 11], [22]], [[22, 11, 4]] * 2):
            with pytest.raises(PartitionError):
                partitions_of_groups(self.shapes, [[], []], lengths)
        with pytest.raises(PartitionError):
            partitions_of_params(self.shapes, [[36], [36]])


class TestZero2(ReaderContract):
    """What every reader promises, of files as DeepSpeed before 0.7 wrote them."""

    reader = DeepSpeedReader()

    def save(self, directory: Path) -> Path:
        model = {name: torch.from_numpy(weight) for name, weight in WEIGHTS.items()}
        flat = torch.cat([weight.flatten() for weight in model.values()])
        made = _old_files(2, [one.clone() for one in flat.chunk(2)])
        for name in (OPTIM_0, OPTIM_1):
            del made[name]["optimizer_state_dict"]["param_alignment_paddings"]
        shapes = [{name: weight.shape for name, weight in model.items()}]
        module = {"module": {name: weight[:0] for name, weight in model.items()}, "param_shapes": shapes}
        save(made | {MODEL: module}, directory)
        return directory

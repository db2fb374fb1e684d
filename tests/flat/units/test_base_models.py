"""``units --config``: the units of Hugging Face's models from config.json and the headers of their weights alone.

The oracle is transformers, which builds the models, and FSDP1, which wraps them on the "fake" process group.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdpckpt
from fsdpckpt.flat.live.save import units_of
from fsdpckpt.flat.units.architectures import known_architectures
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.units_json import loads
from tests.cli.conftest import Run, run
from tests.oracle.compare import require_identical

transformers = pytest.importorskip("transformers", reason="transformers is not installed: it makes the base models")
__all__ = ["run"]

pytestmark = pytest.mark.filterwarnings("ignore")

WORLD = 3
SCRIPT = Path(__file__).parents[3] / "scripts" / "architectures"
SCRIPTED = runpy.run_path(str(SCRIPT))
EXPERTS = {"moe_intermediate_size": 9}
DEEPSEEK = {
    "intermediate_size": 22, "moe_intermediate_size": 9, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 7, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
LLAMA = {"intermediate_size": 22, "num_key_value_heads": 1, "max_position_embeddings": 8}


def config_of(model_type: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, **{**SCRIPTED["SMALL"], **SCRIPTED["TOKENS"], **settings})


def built(config: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def wrapped_by_fsdp(
    model: torch.nn.Module, rank: int, *, use_orig_params: bool, layers: set[type] | None = None
) -> FullyShardedDataParallel:
    """``model`` as rank ``rank`` of 3 holds it, with each of its layers in a unit."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    if layers is None:
        layers = {type(module) for module in model.modules() if type(module).__name__ in model._no_split_modules}  # type: ignore[operator]
    policy, device = ModuleWrapPolicy(layers), torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=device)


@pytest.fixture(autouse=True)
def left_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def wrap_options(model: torch.nn.Module) -> list[str]:
    return [word for name in sorted(model._no_split_modules) for word in ("--wrap", name)]  # type: ignore[operator, arg-type]


def unit_rows(units: Units) -> list[object]:
    return [(unit.key, [(param.name, param.shape) for param in unit.params]) for unit in units.units]


def test_the_file_is_what_the_script_writes_with_the_transformers_that_is_installed() -> None:
    document = json.loads(SCRIPTED["TARGET"].read_text())
    assert all(entry["transformers"] < entry["before"] for entry in document["older"].values())
    written = document["architectures"]
    assert written == json.loads(SCRIPTED["render"]())["architectures"]
    assert len(written) >= 10


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {**LLAMA, "tie_word_embeddings": False}),
        ("llama", {**LLAMA, "attention_bias": True, "num_hidden_layers": 11}),
        ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
        ("qwen3", {**LLAMA, "head_dim": 10}),
        ("gemma", {**LLAMA, "head_dim": 10}),
        ("gpt2", {}),
        ("opt", {"ffn_dim": 20, "max_position_embeddings": 8, "word_embed_proj_dim": 8}),
        ("starcoder2", {**LLAMA, "use_bias": False}),
        ("gemma2", {**LLAMA, "head_dim": 10}),
        ("mixtral", {**LLAMA, "num_local_experts": 11, "tie_word_embeddings": True}),
        ("qwen3_moe", {**LLAMA, **EXPERTS, "num_experts": 3, "mlp_only_layers": [1], "num_hidden_layers": 3}),
        ("qwen2_moe", {**LLAMA, **EXPERTS, "num_experts": 3, "shared_expert_intermediate_size": 7}),
        ("olmoe", {**LLAMA, "num_experts": 2}),
        ("deepseek_v3", {**DEEPSEEK, "num_hidden_layers": 3}),
        ("deepseek_v3", {**DEEPSEEK, "first_k_dense_replace": 0, "attention_bias": True}),
        ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "num_hidden_layers": 3}),
        ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value)[-60:] or "default",
)
def test_the_units_are_those_that_fsdp_makes(
    model_type: str, settings: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    model = built(config_of(model_type, **settings))
    model.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    version = ("--transformers-version", transformers.__version__) if model_type in SCRIPTED["SINCE"] else ()
    wrap = wrap_options(model)
    units = made(run, "--config", tmp_path / "base", *wrap, *version, "--use-orig-params")
    truth = units_of(wrapped_by_fsdp(model, 0, use_orig_params=True))
    assert unit_rows(units) == unit_rows(truth)
    assert units.parameters == truth.parameters
    assert sorted(units.shared) == sorted(truth.shared)


@pytest.fixture(scope="module", params=[False, True], ids=["flat", "orig"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(raw optimizer files of 3 ranks of a float32 job, its bfloat16 base directory, the state of the whole job)."""
    directory = tmp_path_factory.mktemp("trained")
    config = config_of("llama", **LLAMA, tie_word_embeddings=True)
    built(config).to(torch.bfloat16).save_pretrained(directory / "base")  # type: ignore[operator]
    truth: dict[str, torch.Tensor] = {}
    names = [name for name, _ in built(config).named_parameters()]
    (directory / "ranks").mkdir()
    for rank in range(WORLD):
        model = built(config).to(torch.float32)
        for number, param in enumerate(model.parameters()):
            torch.manual_seed(number)
            truth[names[number]] = torch.randn(param.shape)
            param.data.copy_(truth[names[number]])
        sharded = wrapped_by_fsdp(model, rank, use_orig_params=request.param)
        optimizer = torch.optim.AdamW(sharded.parameters(), betas=(0.0, 0.9))
        for param in sharded.parameters():
            param.grad = param.detach().clone() if param.numel() else None  # exp_avg becomes the parameter itself
        optimizer.step()
        torch.save(optimizer.state_dict(), directory / "ranks" / f"optim_world_size_{WORLD}_rank_{rank}.pt")
    dist.destroy_process_group()
    torch.save(truth, directory / "truth.pt")
    return directory / "ranks", directory / "base", directory / "truth.pt"


def test_flat_shards_with_a_base_directory_are_converted_by_following_the_error(
    trained: tuple[Path, Path, Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, base, truth_file = trained
    monkeypatch.chdir(tmp_path)
    convert = ("convert", ranks, tmp_path / "full.pt", "--to", "full", "--key-type", "name")
    refused = run(*convert, "--reference", base)
    assert refused.code == 4
    command = next(line.split() for line in refused.err.splitlines() if line.strip().startswith("fsdpckpt units"))
    assert command == [
        "fsdpckpt", "units", "--config", str(base), "--wrap", "LlamaDecoderLayer", "--from", str(ranks),
        "-o", "units.json",
    ]  # fmt: skip
    done = run(*command[1:])
    assert done.code == 0, done.err
    done = run(*convert, "--units", "units.json")
    assert done.code == 0, done.err
    truth, written = torch.load(truth_file), torch.load(tmp_path / "full.pt")["optimizer"]["state"]
    require_identical({name: states["exp_avg"] for name, states in written.items()}, truth)


def test_an_export_becomes_flat_shards_by_following_the_error(
    trained: tuple[Path, Path, Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, base, _ = trained
    monkeypatch.chdir(tmp_path)
    convert = ("convert", base, tmp_path / "flat", "--to", "flattened", "--world-size", "2", "--use-orig-params")
    refused = run(*convert, "--unit", "model.layers.*", "--buffers", "none")
    assert refused.code == 4
    command = next(line.split() for line in refused.err.splitlines() if line.strip().startswith("fsdpckpt units"))
    assert "--from" not in command
    assert run(*command[1:], "--use-orig-params").code == 0
    done = run(*convert, "--units", "units.json")
    assert done.code == 0, done.err
    assert fsdpckpt.diff(base, tmp_path / "flat").same


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (
            {"architectures": ["Gemma3nForCausalLM"]},
            4,
            "the parameters of Gemma3nForCausalLM is not known",
        ),
        ({"architectures": None}, 4, "is not known"),
        ({"num_hidden_layers": 3}, 3, "num_hidden_layers is 3"),
        ({"tie_word_embeddings": False}, 3, "there is no lm_head.weight"),
        ({"architectures": ["Qwen3ForCausalLM"]}, 3, "there is no model.layers.0.self_attn.q_norm.weight"),
        ({"architectures": ["GPT2LMHeadModel"]}, 3, "GPT2LMHeadModel has no parameter model.embed_tokens.weight"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, 3, "quant_method fp8"),
        ({"quantization_config": {"load_in_4bit": True}}, 3, "are quantized"),
    ],
    ids=str,
)
def test_what_the_weights_contradict_is_refused(
    change: dict[str, Any], code: int, said: str, trained: tuple[Path, Path, Path], run: Run, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes((trained[1] / "model.safetensors").read_bytes())
    fields = json.loads((trained[1] / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**fields, **change}))
    done = run("units", "--config", base, "--wrap", "LlamaDecoderLayer")
    assert (done.code, done.out) == (code, "")
    assert said in done.err


def test_other_classes_than_those_of_the_job_are_refused(
    trained: tuple[Path, Path, Path], run: Run, tmp_path: Path
) -> None:
    ranks, base, _ = trained
    done = run("units", "--config", base, "--wrap", "LlamaMLP", "--from", ranks)
    assert done.code in (2, 3, 4) and done.out == ""
    for code, said, words in (
        (2, "LlamaForCausalLM has no module of class LlamaBlock", ("--config", base, "--wrap", "LlamaBlock")),
        (4, "--wrap LlamaDecoderLayer", ("--config", base)),
        (2, "", ("--config", base, "--model", "a:b", "--wrap", "none")),
        (3, "", ("--config", tmp_path, "--wrap", "none")),
        (2, "", ("--config", base, "--wrap", "none", "--ignore", "model.norm")),
        (2, "--transformers-version has no effect", ("--from", tmp_path, "--transformers-version", "4.46")),
        (2, "", ("--config", tmp_path, "--wrap", "none", "--transformers-version", "new")),
    ):
        refused(run, code, *words, said=[said])


def test_a_class_may_be_named_with_its_module_and_what_is_assumed_is_said(
    trained: tuple[Path, Path, Path], run: Run
) -> None:
    module = "transformers.models.llama.modeling_llama:LlamaDecoderLayer"
    done = [run("units", "--config", trained[1], "--wrap", name) for name in ("LlamaDecoderLayer", module)]
    units = [made(run, "--config", trained[1], "--wrap", name) for name in ("LlamaDecoderLayer", module)]
    assert units[0] == units[1]
    assumed = "use_orig_params=False, FSDP's own default"
    assert all(assumed in one.out + one.err for one in done)
    given = run("units", "--config", trained[1], "--wrap", module, "--use-orig-params")
    assert given.code == 0 and assumed not in given.out + given.err


def test_layers_are_in_the_order_of_their_numbers() -> None:
    (llama,) = known_architectures()["LlamaForCausalLM"]
    names = [name.format(10) for name in llama.parameters] + [name.format(9) for name in llama.parameters]
    numbers = re.findall(r"layers\.(\d+)\.self_attn\.q_proj\.weight", " ".join(llama.in_order(sorted(set(names)))))
    assert numbers == ["9", "10"]


# Models that another version of transformers builds otherwise.


class Layer(torch.nn.Module):
    """A Mixtral layer as transformers 4 builds it: the experts in a list, beside their gate."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.self_attn = named_linears("q_proj", "k_proj", "v_proj", "o_proj")
        self.block_sparse_moe = named_linears("gate")
        self.block_sparse_moe.experts = torch.nn.ModuleList(named_linears("w1", "w2", "w3") for _ in range(experts))
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))


def named_linears(*names: str) -> torch.nn.Module:
    module = torch.nn.Module()
    for name in names:
        module.add_module(name, torch.nn.Linear(4, 4, bias=False))
    return module


def mixtral(experts: int, layers: int = 2) -> torch.nn.Module:
    model = torch.nn.Module()
    model.model = named_linears()
    model.model.embed_tokens = torch.nn.Embedding(8, 4)
    model.model.layers = torch.nn.ModuleList(Layer(experts) for _ in range(layers))
    model.model.norm = Norm()
    model.lm_head = torch.nn.Linear(4, 8, bias=False)
    return model


def saved_base(directory: Path, model: torch.nn.Module, architecture: str) -> Path:
    directory.mkdir()
    save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})
    config = {"architectures": [architecture], "tie_word_embeddings": False, "transformers_version": "4.53.3"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def made(run: Run, *words: object) -> Units:
    done = run("units", *words, "--json")
    assert done.code == 0, done.err
    return loads(done.out.encode(), source="stdout")


def refused(run: Run, code: int, *words: object, said: Sequence[str]) -> None:
    done = run("units", *words)
    assert (done.code, done.out) == (code, "")
    assert all(word in done.err for word in said), done.err


def test_experts_are_counted_by_layer_and_by_number(run: Run, tmp_path: Path) -> None:
    model = mixtral(experts=11)
    base = saved_base(tmp_path / "base", model, "MixtralForCausalLM")
    asked = "add --transformers-version VERSION", "known for transformers 5.0 or newer", "before 5.0"
    refused(run, 4, "--config", base, "--wrap", "MixtralDecoderLayer", said=asked)
    options = ("--wrap", "MixtralDecoderLayer", "--transformers-version", "4.53.3", "--use-orig-params")
    units = made(run, "--config", base, *options)
    truth = units_of(wrapped_by_fsdp(model, 0, use_orig_params=True, layers={Layer}))
    assert unit_rows(units) == unit_rows(truth)


def test_files_with_fused_experts_are_taken_as_they_are(run: Run, tmp_path: Path) -> None:
    model = built(config_of("qwen3_moe", **LLAMA, **EXPERTS, num_experts=3))
    model.save_pretrained(tmp_path / "apart")  # type: ignore[operator]
    model.save_pretrained(tmp_path / "fused", save_original_format=False)  # type: ignore[operator]
    with fsdpckpt.open(tmp_path / "apart") as apart, fsdpckpt.open(tmp_path / "fused") as fused:
        assert len(apart) > len(fused)
    command = ("--wrap", "Qwen3MoeDecoderLayer", "--transformers-version", "5.24")
    one, other = (unit_rows(made(run, "--config", tmp_path / name, *command)) for name in ("apart", "fused"))
    assert one == other


def test_flat_shards_of_fused_experts_become_the_models_own_weights(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of("deepseek_v3", **DEEPSEEK, num_hidden_layers=3)
    built(config).save_pretrained("base")  # type: ignore[operator]
    Path("ranks").mkdir()
    for rank in range(WORLD):
        sharded = wrapped_by_fsdp(built(config), rank, use_orig_params=False)
        optimizer = torch.optim.AdamW(sharded.parameters(), betas=(0.0, 0.9))
        for param in sharded.parameters():
            param.grad = param.detach().clone()  # exp_avg becomes the parameter itself
        optimizer.step()
        torch.save(optimizer.state_dict(), Path("ranks") / f"optim_world_size_{WORLD}_rank_{rank}.pt")
    made = ("units", "--config", "base", "--wrap", "DeepseekV3DecoderLayer", "--from", "ranks")
    done = run(*made, "--transformers-version", "5.0", "-o", "units.json")
    assert done.code == 0, done.err
    done = run("convert", "ranks", "full.pt", "--to", "full", "--key-type", "name", "--units", "units.json")
    assert done.code == 0, done.err
    written = torch.load("full.pt")["optimizer"]["state"]
    truth = dict(built(config).named_parameters())
    require_identical({name: states["exp_avg"] for name, states in written.items()}, truth)


def test_a_layer_of_no_kind_is_refused(run: Run, tmp_path: Path) -> None:
    """Experts without their gate, and a layer that has the parameters of a dense one besides."""
    base = tmp_path / "base"
    built(config_of("qwen3_moe", **LLAMA, **EXPERTS, num_experts=2)).save_pretrained(base)  # type: ignore[operator]
    weights = load_file(base / "model.safetensors")
    gate = weights.pop("model.layers.1.mlp.gate.weight")
    save_file(weights, base / "model.safetensors")
    command = ("--config", base, "--wrap", "none", "--transformers-version", "5.24")
    refused(run, 3, *command, said=["there is no model.layers.1.mlp.gate.weight"])
    weights |= {"model.layers.1.mlp.gate.weight": gate, "model.layers.1.mlp.up_proj.weight": torch.ones(22, 16)}
    save_file(weights, base / "model.safetensors")
    refused(run, 3, *command, said=["model.layers.1.mlp.up_proj.weight belongs to another kind of layer"])


def test_a_layer_without_one_of_its_experts_is_refused(run: Run, tmp_path: Path) -> None:
    model = mixtral(experts=3)
    block = model.get_submodule("model.layers.1.block_sparse_moe")
    block.experts = block.experts[:2]  # type: ignore[index]
    command = ("--config", saved_base(tmp_path / "base", model, "MixtralForCausalLM"), "--wrap", "none")
    for version, said in (
        ("4.53", "block_sparse_moe.experts.* has 2 modules, and other layers have 3"),
        ("5.24", "layers.1.block_sparse_moe.experts.2.w1.weight is missing"),
    ):
        refused(run, 3, *command, "--transformers-version", version, said=[said])


def test_the_norms_of_gemma_2_are_where_the_jobs_version_has_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = built(config_of("gemma2", **LLAMA, head_dim=10))
    model.save_pretrained("base")  # type: ignore[operator]
    orders = {}
    command = ("--config", "base", "--wrap", "Gemma2DecoderLayer")
    for version in ("4.46.3", "4.47.1", "5.24"):
        names = [param.name for param in made(run, *command, "--transformers-version", version).units[1].params]
        orders[version] = [name.split(".")[3] for name in names if "layernorm" in name]
    now = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    assert orders["4.47.1"] == orders["5.24"] == now
    assert orders["4.46.3"] == [now[0], now[2], now[3], now[1]]

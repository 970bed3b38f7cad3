"""Adapters against the peft package on the same checkpoint; what a run with them leaves alone, keeps and resumes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import load_decoder, published_views, save_model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.settings.config_class import config_from_mapping
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.checkpoints.export import export_adapter, export_model, find_checkpoint, write_adapter
from agentgym.trainers.checkpoints.run_folder import read_settings
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.learner.lora import adapt
from agentgym.trainers.settings.checkpoint import CheckpointConfig
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.lora import PROJECTIONS, LoraConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

# peft asks transformers by a name that is on its way out there.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

Tiny = Callable[..., Decoder]
Fresh = Callable[..., TrainingBatch]
Train = Callable[..., Any]

LORA = LoraConfig(rank=4, alpha=8.0)
STEP = OptimizerConfig(learning_rate=3e-4, warmup_steps=1)
TARGETS = {
    "all": PROJECTIONS,
    "some-of-each-matrix": ("k_proj", "o_proj", "up_proj"),
    "peft's-own": ("q_proj", "v_proj"),
}


def learner_of(model: Decoder, base: Decoder | None = None, lora: LoraConfig = LORA, **settings: Any) -> Learner:
    config = LearnerConfig(**{"threads": 1, "lora": lora, **settings})
    return Learner(model, config, STEP, total_steps=8, reference=base)


def stirred(learner: Learner) -> dict[str, Any]:
    """The state of adapters whose B is not 0, so that A has a gradient; the learner has it from now on."""
    assert learner.adapters is not None
    state = learner.state_dict()
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = state["lora"]["tensors"]
    drawn = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    state["lora"]["tensors"] = drawn
    learner.load_state_dict(state)
    return state


def in_peft(model: Decoder, state: dict[str, Any], folder: Path) -> Any:
    """The same model and adapters in transformers and peft, by way of their folders."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_model_folder(model, folder / "base")
    (folder / "adapter").mkdir()
    write_adapter(state["lora"], folder / "adapter", str(folder / "base"), torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)


def their_loss(theirs: Any, batch: TrainingBatch) -> Tensor:
    """The policy gradient of the batch at ratio 1, by the plain formula: the sum of -weight x advantage x ratio."""
    total = torch.zeros(())
    columns = (batch.ids_N, batch.target_N, batch.mask_N, batch.weight_N, batch.advantage_N)
    for ids_T, target_T, mask_T, weight_T, advantage_T in zip(
        *(column.split(batch.seqlens) for column in columns), strict=True
    ):
        logp_T = theirs(ids_T[None]).logits[0].log_softmax(-1).gather(1, target_T[:, None])[:, 0]
        ratio_T = (logp_T - logp_T.detach()).exp()
        total = total - (weight_T * advantage_T * ratio_T)[mask_T].sum()
    return total


def moved_to(batch: TrainingBatch, learner: Learner) -> TrainingBatch:
    """As the learner's policy would have sampled it."""
    logp_N = torch.zeros_like(batch.old_logp_N)
    logp_N[batch.mask_N] = learner.logprobs(batch)
    return replace(batch, old_logp_N=logp_N, sampled_logp_N=logp_N)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("shared", [0, 40], ids=["rows-apart", "rows-with-a-prefix"])
def test_gradients_are_those_of_peft(
    targets: tuple[str, ...], shared: int, tiny: Tiny, fresh_batch: Fresh, tmp_path: Path
) -> None:
    model = tiny()
    batch = fresh_batch(model, num_groups=2, shared=shared)
    learner = learner_of(copy.deepcopy(model), lora=replace(LORA, target_modules=targets))
    theirs = in_peft(model, stirred(learner), tmp_path)
    their_loss(theirs, batch).backward()
    gradients: list[Tensor] = []
    step = learner.optimizer.step

    def seen() -> float:
        gradients.extend(
            parameter.grad.clone() for parameter in learner.optimizer.parameters if parameter.grad is not None
        )
        return step()

    learner.optimizer.step = seen  # type: ignore[method-assign]
    learner.update(moved_to(batch, learner))
    names = list(learner.state_dict()["lora"]["tensors"])
    grads = {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert sorted(names) == sorted(grads) and len(names) == len(gradients) == 4 * len(targets)
    for name, gradient in zip(names, gradients, strict=True):
        assert grads[name].norm() > 1e-3, "both matrices of each adapter have a gradient"
        torch.testing.assert_close(gradient, grads[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@torch.no_grad()
def test_logits_of_every_family_are_those_of_peft(family: str, tiny: Tiny, tmp_path: Path) -> None:
    config = replace(tiny().config, family=family, qk_norm=False, qkv_bias=family == "qwen2", tied=False)
    model = Decoder(config).initialize(1)
    for parameter in model.parameters():
        parameter.mul_(4.0).add_(0.1)
    learner = learner_of(model, lora=replace(LORA, alpha=3.0))
    theirs = in_peft(model, stirred(learner), tmp_path)
    ids_T = torch.arange(3, 30, 2)
    ours_TV = learner.model.logits(learner.model.hidden_states(ids_T, PackedLayout([len(ids_T)])))
    torch.testing.assert_close(ours_TV, theirs(ids_T[None]).logits[0], rtol=1e-5, atol=1e-5)
    with theirs.disable_adapter():
        assert (theirs(ids_T[None]).logits[0] - ours_TV).abs().max() > 0.01


def test_the_first_values_are_drawn_as_pefts_are_and_follow_from_the_seed_alone(tiny: Tiny) -> None:
    def tensors(**changes: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = learner_of(tiny(), lora=replace(LORA, **changes)).state_dict()["lora"]["tensors"]
        return tensors

    first, again, reseeded = tensors(seed=1), tensors(seed=1, target_modules=("q_proj",)), tensors(seed=2)
    for name, tensor in first.items():
        if ".lora_B." in name:
            assert not tensor.any()
            continue
        bound = tensor.shape[1] ** -0.5  # kaiming_uniform with a = sqrt(5)
        assert tensor.abs().max() <= bound and tensor.std() == pytest.approx(bound / 3**0.5, rel=0.25)
        assert not torch.equal(tensor, reseeded[name])
    assert len({float(tensor.sum()) for name, tensor in first.items() if ".lora_A." in name}) == 14
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.items())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_base_stays_and_the_model_has_the_adapters_merged_in(
    tied: bool, tiny: Tiny, fresh_batch: Fresh, tmp_path: Path
) -> None:
    model, base = tiny(tied=tied), tiny(tied=tied)
    batch = fresh_batch(model)
    learner = learner_of(model, base, epochs=2, minibatches=2)
    for _ in range(2):
        learner.update(batch)
    first = dict(published_views(tiny(tied=tied)))
    assert all(torch.equal(tensor, first[name]) for name, tensor in published_views(learner.model)), "to the bit"
    state = learner.state_dict()
    theirs = in_peft(base, state, tmp_path).merge_and_unload().state_dict()
    changed = dict(learner.weights())
    for name, tensor in published_views(model):
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)
        assert torch.equal(tensor, changed.get(name, first[name])) and torch.equal(tensor, first[name]) is (
            name not in changed
        )
    assert len(changed) == 14, "what has no adapter is not sent"
    sizes = [tensor.numel() for tensor in state["lora"]["tensors"].values()]
    numels = [
        tensor.numel()
        for part in state["optimizer"]["parts"]
        for tensor in part["state"].values()
        for tensor in [tensor["exp_avg"]]
    ]
    assert numels == sizes == [parameter.numel() for parameter in learner.optimizer.parameters]
    merged = learner_of(copy.deepcopy(model), lora=LoraConfig())
    torch.testing.assert_close(learner.logprobs(batch), merged.logprobs(batch), rtol=0, atol=1e-5)
    assert (learner.logprobs(batch) - batch.old_logp_N[batch.mask_N]).abs().max() > 0.01


def test_the_reference_is_the_same_weights_without_adapters(tiny: Tiny, fresh_batch: Fresh) -> None:
    model, base = tiny(), tiny()
    batch = fresh_batch(model)
    runs = []
    for threads in (1, 3):
        learner = learner_of(tiny(), tiny(), threads=threads, micro_batch_tokens=40, kl=KLConfig(coefficient=0.1))
        runs.append([learner.update(batch), learner.update(batch), learner.state_dict()["lora"]["tensors"]])
    (first, second, tensors), second_run = runs[0], runs[1]
    assert [first, second] == second_run[:2] and all(
        torch.equal(tensor, second_run[2][name]) for name, tensor in tensors.items()
    )
    assert first.kl == 0 and second.kl > 1e-4
    # In full training the reference is a model of its own: with the policy's weights merged, it says the same.
    learner = learner_of(model, base, kl=KLConfig(coefficient=0.1))
    learner.update(batch)
    full = learner_of(copy.deepcopy(model), tiny(), lora=LoraConfig(), kl=KLConfig(coefficient=0.1))
    assert learner.update(batch).kl == pytest.approx(full.update(batch).kl, rel=1e-3)
    parameters = [*learner.model.parameters(), *model.parameters()]
    numels = {parameter.data_ptr(): parameter.numel() for parameter in parameters}
    matrices = sum(tensor.numel() for name, tensor in dict(published_views(model)).items() if "_proj" in name)
    adapters = sum(parameter.numel() for parameter in learner.optimizer.parameters)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert sum(numels.values()) == whole + matrices + adapters, "one base, and what the engine samples from"


def test_a_base_that_is_another_model_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="'embed' is another one in the model and in the base"):
        learner_of(tiny(), tiny(seed=1))


def test_a_saved_state_is_not_loaded_onto_other_weights(tiny: Tiny) -> None:
    state = learner_of(tiny(), tiny()).state_dict()
    model = tiny()
    with torch.no_grad():
        model.get_parameter("layers.0.qkv")[3, 2] += 0.01
    learner = learner_of(copy.deepcopy(model), model)
    with pytest.raises(ConfigError, match="the weights under the adapters are others than when they were saved"):
        learner.load_state_dict(state)
    del state["lora"]["base"]  # as in checkpoints of earlier versions
    learner.load_state_dict(state)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_critic_learns_by_adapters_of_its_own_or_by_the_policys(trunk: Any, tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    batch = replace(batch, return_N=torch.where(batch.mask_N, 1.0 + batch.advantage_N, 0.0))
    settings = {"critic": CriticConfig(trunk=trunk, clip=None)}
    learner, again = (learner_of(tiny(), tiny(), **settings) for _ in range(2))
    assert learner.critic is not None and again.critic is not None
    error = []
    for _ in range(4):
        learner.update(batch)
        learner.update_critic(batch)
        values_M, _ = learner.critic.read(batch)
        error.append(float((values_M - batch.return_N[batch.mask_N]).square().mean()))
    assert error[-1] < error[0]
    state = learner.state_dict()
    assert trunk == "shared" or all("_adapters" in name for name in state["critic"]["trunk"]), "no frozen weight"
    again.load_state_dict(state)
    assert torch.equal(again.critic.read(batch)[0], learner.critic.read(batch)[0])
    first = dict(published_views(tiny()))
    assert all(torch.equal(tensor, first[name]) for name, tensor in published_views(learner.critic.backbone))


def test_a_saved_state_goes_on_to_the_bit(tiny: Tiny, fresh_batch: Fresh) -> None:
    batch = fresh_batch(tiny())
    learner = learner_of(tiny(), tiny())
    learner.update(batch)
    state, between = copy.deepcopy(learner.state_dict()), copy.deepcopy(dict(learner.weights()))
    learner.update(batch)
    again = learner_of(tiny(), tiny())
    again.load_state_dict(state)
    assert all(torch.equal(tensor, between[name]) for name, tensor in again.weights())
    again.update(batch)
    assert all(
        torch.equal(left, right) for (_, left), (_, right) in zip(again.weights(), learner.weights(), strict=True)
    )
    with pytest.raises(ConfigError, match="the state is of other adapters"):
        learner_of(tiny(), lora=replace(LORA, rank=8)).load_state_dict(state)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_either_optimizer_trains_adapters(name: Any, tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    config = LearnerConfig(threads=1, lora=LORA, activation_checkpointing=True)
    learner = Learner(model, config, replace(STEP, name=name), total_steps=8)
    losses = [learner.update(batch).loss for _ in range(4)]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, "0 to train all weights"),
        ({"rank": 4, "alpha": 0.0}, "alpha must be above 0"),
        ({"rank": 4, "target_modules": ("q_prj",)}, "did you mean 'q_proj'"),
        ({"rank": 4, "target_modules": ()}, "names nothing to adapt"),
        ({"rank": 4, "learning_rate": 0.0}, "learning_rate must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_advice(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings)


def test_a_recorded_run_loads_with_the_dropout_of_0_that_adapters_had(tmp_path: Path) -> None:
    recorded = {"algo": "grpo", "env": "X", "learner": {"lora": {"rank": 4, "dropout": 0.0}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded))
    assert config_from_mapping(TrainConfig, read_settings(tmp_path)).learner.lora == LoraConfig(rank=4)


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_is_exported_merged_or_as_an_adapter(
    small_run: TrainConfig, train: Train, tmp_path: Path
) -> None:
    learner = replace(small_run.learner, lora=LoraConfig(rank=4), kl=KLConfig(coefficient=0.01))
    run = replace(small_run, learner=learner, optimizer=STEP, checkpoint=CheckpointConfig(every=2))
    whole, _ = train(replace(run, steps=4), tmp_path / "whole")
    train(replace(run, steps=2), tmp_path / "parts")
    resumed, _ = train(replace(run, steps=4), tmp_path / "parts", resume=True)
    for name in ("episodes.jsonl.zst", "checkpoints/step-000004/model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert whole.checkpoint is not None and resumed.checkpoint is not None
    checkpoint = find_checkpoint(tmp_path / "parts")
    export_model(checkpoint, tmp_path / "merged")
    export_adapter(checkpoint, tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(embedded_folder()) and config["r"] == 4
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids_T = torch.arange(7, 60, 3)
    ours = load_decoder(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    with torch.no_grad():
        first_TV = base(ids_T[None]).logits[0]
        ours_TV = ours.logits(ours.hidden_states(ids_T, PackedLayout([len(ids_T)])))
        theirs_TV = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids_T[None]).logits[0]
    torch.testing.assert_close(theirs_TV, ours_TV, rtol=1e-5, atol=1e-5)
    assert (theirs_TV - first_TV).abs().max() > 1e-3
    with pytest.raises(RunFolderError, match=r"other settings.*rank: 4 there, 8 here"):
        train(replace(run, learner=replace(learner, lora=LoraConfig(rank=8))), tmp_path / "parts", resume=True)


@pytest.mark.long
def test_a_run_without_an_adapter_has_none_to_export(small_run: TrainConfig, train: Train, tmp_path: Path) -> None:
    train(replace(small_run, steps=1), tmp_path / "run")
    with pytest.raises(ConfigError, match="the run trained all weights"):
        export_adapter(find_checkpoint(tmp_path / "run"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_the_share_of_adapters_that_rounded_weights_lack_is_measured(tiny: Tiny, fresh_batch: Fresh) -> None:
    losses = {}
    for dtype, size in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.bfloat16, 0.5)):
        learner = learner_of(tiny().to(dtype), lora=LORA)
        assert learner.adapters is not None
        base = {name: tensor.float().clone() for name, tensor in learner.weights(trained_only=False)}
        assert learner.adapters.merge_lost is None  # nothing was added yet
        for name, own in learner.model.named_parameters():
            if name.endswith("B_OR"):
                own.copy_(torch.randn(own.shape, generator=torch.Generator().manual_seed(1)) * size)
        merged = dict(learner.weights())
        if dtype == torch.bfloat16:
            state = learner.adapters.state_dict()["tensors"]
            sums = {
                name: state[f"base_model.model.{stem}.lora_B.weight"].float()
                @ state[f"base_model.model.{stem}.lora_A.weight"].float()
                * (LORA.alpha / LORA.rank)
                for name in merged
                if (stem := name.removesuffix(".weight"))
            }
            lost = torch.stack([(merged[name].float() - base[name] - sums[name]).norm() for name in merged]).norm()
            expected = float(lost / torch.stack([tensor.norm() for tensor in sums.values()]).norm())
            assert learner.adapters.merge_lost == pytest.approx(expected, rel=1e-4)
        losses[dtype, size] = learner.adapters.merge_lost
        learner.close()
    assert losses[torch.float32, 1e-5] is None
    assert losses[torch.bfloat16, 1e-5] == pytest.approx(1.0, abs=0.05)
    assert losses[torch.bfloat16, 0.5] < 0.05


def test_adapters_learn_at_ten_times_the_rate_of_all_weights_or_at_their_own(tiny: Tiny, fresh_batch: Fresh) -> None:
    batch = fresh_batch(tiny())
    rates = {rate: learner_of(tiny(), lora=replace(LORA, learning_rate=rate)).update(batch) for rate in (None, 0.02)}
    assert {rate: stats.learning_rate for rate, stats in rates.items()} == pytest.approx({None: 3e-3, 0.02: 0.02})
    assert learner_of(tiny(), lora=LoraConfig(learning_rate=0.02)).update(batch).learning_rate == 3e-4


def test_adapters_are_put_on_before_a_model_is_sharded_or_on_a_copy(tiny: Tiny) -> None:
    model = adapt(tiny(), LORA)
    duplicate = model.like()
    names = [name for name, parameter in duplicate.named_parameters() if parameter.requires_grad]
    assert (
        names == [name for name, parameter in model.named_parameters() if parameter.requires_grad] and len(names) == 28
    )

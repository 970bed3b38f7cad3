"""The table of verl's settings (0.5 to 0.8, `ppo_trainer.yaml`), each with ours."""

from __future__ import annotations

from agentgym.cli.foreign import verl_algorithm as algorithm
from agentgym.cli.foreign import verl_machines as machines
from agentgym.cli.foreign import verl_values as values
from agentgym.cli.foreign.keys import Key, same, skip
from agentgym.cli.foreign.verl_values import ACTOR, ROLLOUT

__all__ = ["VERL_ALWAYS", "VERL_KEYS"]

MODEL, ALGORITHM, TURNS = "actor_rollout_ref.model.", "algorithm.", ROLLOUT + "multi_turn."
MEMORY = "how memory is used: docs/plan.md, learner.fsdp"
LOADING = "data is read before training, in this process"
PROFILE = "--profile.steps traces steps"

DATA = (
    Key("data.train_files", "data.train", default="~/data/rlhf/gsm8k/train.parquet", convert=values.verl_list),
    Key("data.val_files", "data.eval", default="", convert=values.verl_validation),
    Key("data.prompt_key", "data.columns.prompt"),
    Key("data.train_batch_size", "tasks", "prompts of a step", default=1024),
    Key(
        "data.max_prompt_length",
        "data.max_prompt_tokens",
        "longer rows are left out, and counted",
        default=512,
        convert=values.verl_prompt_limit,
    ),
    Key(
        "data.max_response_length",
        "limits.turn_tokens, limits.trajectory_tokens",
        default=512,
        convert=values.verl_reply_limit,
    ),
    Key("data.shuffle", "data.shuffle"),
    Key("data.seed", "seed", "of all random numbers of the run"),
    Key("data.train_max_samples", "data.max_rows", "of each file, val_files too", convert=values.verl_positive),
    Key("data.tool_config_path", "data.tools", convert=values.verl_list),
    same("data.reward_fn_key", "data.columns.data_source: data_source", "data_source"),
    same("data.filter_overlong_prompts", "data.max_prompt_tokens leaves longer rows out"),
    same("data.truncation", "nothing is cut; data.max_prompt_tokens leaves longer rows out"),
    same("data.val_batch_size", "the held-out tasks are played together"),
    same("data.return_raw_chat", "rows keep their messages"),
    same("data.return_raw_input_ids", "sampled ids are kept, always"),
    same("data.return_full_prompt", "`agentgym episodes RUN` has every prompt"),
    same("data.tokenizer", "the model's own"),
    same("data.use_shm", "read once"),
    same("data.filter_overlong_prompts_workers", LOADING),
    same("data.dataloader_num_workers", LOADING),
    same("data.validation_shuffle", "scores do not depend on the order"),
    skip("data.gen_batch_size", "practice.filter replaces groups one by one"),
    skip("data.val_max_samples", "eval.episodes is the number of held-out tasks"),
    skip("data.custom_cls.*", "data.train takes file.py:name, a function that yields dicts or a torch Dataset"),
    skip("data.sampler.*", "practice.sampler, or practice.curriculum: docs/sampling.md"),
    skip("data.datagen.*", "practice.sampler as file.py:Class is asked again at each step"),
    Key("data.apply_chat_template_kwargs.*", "chat_template_kwargs.*"),
    same("data.apply_chat_template_kwargs", "none", {}, None),
    skip("data.trust_remote_code", "no code of a model's folder is run; model_backend takes file.py:Class"),
    skip("data.*image*", "text alone: rows with images are refused"),
    skip("data.*video*", "text alone"),
    skip("data.return_multi_modal_inputs", "text alone"),
)
MODEL_KEYS = (
    Key(MODEL + "path", "model", default="~/models/deepseek-llm-7b-chat", convert=values.verl_home_path),
    Key(
        MODEL + "lora_rank",
        "learner.lora.rank, learner.lora.learning_rate",
        "with the rate of optimizer.learning_rate",
        convert=algorithm.verl_lora_rank,
    ),
    Key(
        MODEL + "lora.rank",
        "learner.lora.rank, learner.lora.learning_rate",
        "with the rate of optimizer.learning_rate",
        convert=algorithm.verl_lora_rank,
    ),
    Key(MODEL + "lora.alpha", "learner.lora.alpha", convert=algorithm.verl_lora_alpha),
    skip(MODEL + "lora.*", "learner.lora has rank, alpha, target_modules, learning_rate, seed"),
    skip(MODEL + "torch_dtype", "learner.dtype"),
    Key(MODEL + "lora_alpha", "learner.lora.alpha", default=16, convert=algorithm.verl_lora_alpha),
    Key(MODEL + "target_modules", "learner.lora.target_modules", convert=algorithm.verl_lora_layers),
    Key(MODEL + "enable_gradient_checkpointing", "learner.activation_checkpointing"),
    same(MODEL + "use_remove_padding", "rows are packed, without padding"),
    same(MODEL + "use_shm", "read once"),
    same(MODEL + "tokenizer_path", "the model's own"),
    same(MODEL + "hf_config_path", "the model's own"),
    same(MODEL + "enable_activation_offload", MEMORY, False),
    skip(MODEL + "use_liger", "learner.head_kernel: liger is Liger's fused loss"),
    skip(MODEL + "*fused_kernel*", "learner.head_kernel: liger is a fused loss"),
    skip(MODEL + "custom_chat_template", "write it to a file, and name that in chat_template"),
    skip(MODEL + "trust_remote_code", "no code of a model's folder is run; model_backend takes file.py:Class"),
    skip(MODEL + "lora_adapter_path", "merge the adapter into a model folder, and train that"),
    skip(MODEL + "exclude_modules", "learner.lora.target_modules names those that are adapted"),
    skip(MODEL + "external_lib", "a module is imported where a setting names it as package.module:name"),
    skip(MODEL + "override_config*", "edit the config.json of the model's folder"),
    skip(MODEL + "tiled_mlp.*", MEMORY),
    skip(MODEL + "mtp.*", "heads for several tokens are not trained"),
)
OPTIMIZER = (
    Key(ACTOR + "optim.lr", "optimizer.learning_rate", default=1e-6),
    Key(ACTOR + "optim.weight_decay", "optimizer.weight_decay", default=0.01),
    Key(
        ACTOR + "optim.betas",
        "optimizer.betas",
        default=[0.9, 0.999],
        convert=algorithm.verl_betas,
    ),
    Key(
        ACTOR + "optim.lr_warmup_steps",
        "optimizer.warmup_steps",
        default=-1,
        convert=algorithm.verl_warmup_steps,
    ),
    Key(ACTOR + "optim.lr_warmup_steps_ratio", "optimizer.warmup_steps", convert=algorithm.verl_warmup),
    Key(ACTOR + "optim.lr_scheduler_type", "optimizer.decay", convert=algorithm.verl_schedule),
    Key(ACTOR + "optim.warmup_style", "optimizer.decay", convert=algorithm.verl_schedule),
    Key(ACTOR + "grad_clip", "optimizer.max_grad_norm", default=1.0),
    Key(ACTOR + "optim.optimizer", "optimizer.name", default="AdamW", convert=algorithm.verl_optimizer),
    same(ACTOR + "optim.optimizer_impl", "torch.optim", "torch.optim"),
    same(ACTOR + "optim.clip_grad", "grad_clip counts"),
    same(ACTOR + "optim.min_lr_ratio", "with cosine, optimizer.decay_settings.floor"),
    same(ACTOR + "optim.num_cycles", "cosine goes down once", 0.5),
    same(ACTOR + "optim.total_training_steps", "the run's own steps"),
    skip(ACTOR + "optim.*", "optimizer.settings has those of other optimizers"),
)
ACTOR_KEYS = (
    Key(
        ACTOR + "ppo_mini_batch_size",
        "learner.minibatches",
        "tasks over the prompts of a minibatch",
        default=256,
        convert=values.verl_minibatches,
    ),
    Key(ACTOR + "ppo_epochs", "learner.epochs", default=1),
    Key(ACTOR + "policy_loss.loss_mode", "learner.loss", default="vanilla", convert=algorithm.verl_loss),
    Key(ACTOR + "loss_agg_mode", "aggregation", default="token-mean", convert=algorithm.verl_aggregation),
    Key(ACTOR + "entropy_coeff", "learner.entropy_coefficient", default=0),
    Key(
        ACTOR + "use_kl_loss",
        "learner.kl.coefficient, learner.kl.penalty",
        default=False,
        convert=algorithm.verl_kl_in_loss,
    ),
    Key(ACTOR + "ppo_micro_batch_size_per_gpu", "learner.micro_batch_tokens", convert=values.verl_micro_tokens),
    Key(ACTOR + "ppo_max_token_len_per_gpu", "learner.micro_batch_tokens"),
    Key(ACTOR + "ulysses_sequence_parallel_size", "learner.mesh.sequence", convert=machines.verl_parallel),
    Key(ACTOR + "megatron.tensor_model_parallel_size", "learner.mesh.tensor", convert=machines.verl_tensor_parallel),
    Key(ACTOR + "megatron.expert_model_parallel_size", "learner.mesh.expert", convert=machines.verl_expert_parallel),
    Key(
        ACTOR + "fsdp_config.param_offload",
        "learner.fsdp.cpu_offload",
        convert=machines.verl_ranks_only,
    ),
    Key(ACTOR + "fsdp_config.reshard_after_forward", "learner.fsdp.reshard_after_forward"),
    *(same(ACTOR + name, "in learner.loss_settings") for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")),
    same(ACTOR + "clip_ratio", "verl itself reads clip_ratio_low and clip_ratio_high first: in learner.loss_settings"),
    *(same(ACTOR + name, "in learner.loss_settings") for name in ("tau_pos", "tau_neg", "policy_loss.*")),
    *(same(ACTOR + name, "in learner.kl, if use_kl_loss") for name in ("kl_loss_coef", "kl_loss_type")),
    same(ACTOR + "loss_scale_factor", "norm_tokens, with seq-mean-token-sum-norm"),
    same(ACTOR + "use_dynamic_bsz", "micro-batches are packed by tokens"),
    same(ACTOR + "ppo_micro_batch_size", "micro-batches are packed by tokens"),
    same(ACTOR + "calculate_entropy", "metrics.jsonl has the entropy"),
    same(ACTOR + "shuffle", "each pass has an order of its own, by the seed"),
    same(ACTOR + "data_loader_seed", "the run's seed"),
    same(ACTOR + "strategy", "several ranks are fully_shard (FSDP2), with learner.mesh for more", "fsdp", "fsdp2"),
    same(ACTOR + "rollout_n", "group_size"),
    same(ACTOR + "load_weight", "the model's weights are loaded", True),
    same(ACTOR + "use_torch_compile", "how it computes"),
    same(ACTOR + "use_remove_padding", "rows are packed, without padding"),
    same(ACTOR + "router_replay.mode", "learner.router.replay computes with the experts that sampled", "disabled"),
    skip(ACTOR + "router_replay.*", "learner.router.replay records and replays in one run"),
    same(ACTOR + "checkpoint.*", "a checkpoint has model, optimizer and everything that a run resumes from"),
    skip(ACTOR + "profiler.*", PROFILE),
    skip(ACTOR + "megatron.*", "learner.mesh.tensor and learner.mesh.sequence split a forward pass"),
    skip(ACTOR + "fsdp_config.*", MEMORY),
    skip(ACTOR + "*entropy*", MEMORY),
    skip(ACTOR + "use_fused_kernels", "learner.head_kernel: liger is a fused loss"),
    skip(ACTOR + "use_prefix_grouper", "the prompt of a group is computed once, always"),
    skip(ACTOR + "*sum_pi_squared*", "the estimator optimal_token_baseline computes what it needs"),
    skip(ACTOR + "freeze_vision_tower", "text alone"),
    same("actor_rollout_ref.ref.*", "the reference is computed as the policy is, if learner.kl.coefficient is above 0"),
    same("actor_rollout_ref.hybrid_engine", "the engine gets each step's weights", True),
    skip("actor_rollout_ref.nccl_timeout", "ray.start_s, and torch's own"),
)
ROLLOUT_KEYS = (
    Key(ROLLOUT + "n", "group_size", default=1),
    Key(ROLLOUT + "name", "engine", convert=machines.verl_engine),
    Key(ROLLOUT + "temperature", "sampling.temperature"),
    Key(ROLLOUT + "val_kwargs.temperature", "eval.temperature", default=0, convert=values.verl_eval_temperature),
    Key(ROLLOUT + "val_kwargs.n", "eval.repeats"),
    Key(
        ROLLOUT + "top_p",
        remark="refused: the trainer's logprobs are those of the whole distribution",
        convert=values.verl_neutral(1, "the trainer's logprobs are those of the whole distribution"),
    ),
    Key(
        ROLLOUT + "top_k",
        remark="refused: the trainer's logprobs are those of the whole distribution",
        convert=values.verl_neutral(-1, "the trainer's logprobs are those of the whole distribution"),
    ),
    Key(ROLLOUT + "max_model_len", "limits.context_window"),
    *(
        Key(ROLLOUT + name, "server.server_args", convert=machines.verl_engine_arg(name))
        for name in (
            "gpu_memory_utilization tensor_model_parallel_size max_num_seqs max_num_batched_tokens "
            "enforce_eager".split()
        )
    ),
    Key(TURNS + "tool_config_path", "data.tools", convert=values.verl_tool_files),
    Key(
        TURNS + "interaction_config_path",
        "data.tools",
        "its scores are the rewards of replies, unless reward.function scores the episode",
        convert=values.verl_tool_files,
    ),
    Key(TURNS + "max_assistant_turns", "env_kwargs.max_turns", convert=values.verl_turn_limit),
    Key(
        TURNS + "max_user_turns",
        "env_kwargs.max_turns",
        "the replies after which the environment ends an episode: one more than verl's answers",
        convert=values.verl_turn_limit,
    ),
    same(TURNS + "enable", "an episode goes on while the reply calls tools"),
    same(TURNS + "format", "the chat family of the model's template"),
    same(TURNS + "tokenization_sanity_check_mode", "sampled ids are kept, so there is nothing to compare"),
    same(TURNS + "use_inference_chat_template", "history: append, or rerender"),
    skip(TURNS + "max_parallel_calls", "all calls of a reply are run"),
    skip(TURNS + "*tool_response*", "a tool's answer is shown as it is: cut it in the tool"),
    skip(TURNS + "*", "no setting"),
    same(ROLLOUT + "agent.default_agent_loop", "docs/data.md", "single_turn_agent", "tool_agent"),
    skip(ROLLOUT + "agent.agent_loop_config_path", "data.agents names the environment of each agent_name"),
    skip(ROLLOUT + "agent.num_workers", "ray.workers, or sampler.env_processes"),
    skip(ROLLOUT + "agent.*", "engine as file.py:name is an engine of your own"),
    same(ROLLOUT + "mode", "rollout is asynchronous", "async"),
    same(ROLLOUT + "calculate_log_probs", "sampled logprobs are always recorded"),
    same(ROLLOUT + "do_sample", "training samples", True),
    same(ROLLOUT + "ignore_eos", "a reply ends with its end token", False),
    same(ROLLOUT + "prompt_length", "data.max_prompt_length"),
    same(ROLLOUT + "response_length", "data.max_response_length"),
    same(ROLLOUT + "log_prob_*", "logprobs are computed in the learner's micro-batches"),
    same(ROLLOUT + "val_kwargs.do_sample", "in eval.temperature"),
    same(ROLLOUT + "val_kwargs.top_p", "evaluations draw from the whole distribution", 1, 1.0),
    same(ROLLOUT + "val_kwargs.top_k", "evaluations draw from the whole distribution", -1),
    Key(ROLLOUT + "free_cache_engine", "server.serving.sleep", convert=machines.verl_sleep),
    same(ROLLOUT + "load_format", "the engine gets the learner's weights"),
    same(ROLLOUT + "enable_chunked_prefill", "on by default; server.server_args switches it off", True),
    same(ROLLOUT + "enable_prefix_caching", "on by default; server.server_args switches it off", True),
    same(ROLLOUT + "dtype", "server.dtype: auto", "bfloat16"),
    same(ROLLOUT + "logprobs_mode", "logprobs are those of the distribution that was sampled", "processed_logprobs"),
    skip(ROLLOUT + "enable_rollout_routing_replay", "learner.router.replay: true"),
    skip(ROLLOUT + "over_sample_rate", "max_staleness above 0 learns from the groups that finish first"),
    skip(ROLLOUT + "engine_kwargs.*", "server.server_args takes options of the server"),
    skip(ROLLOUT + "trace.*", "`agentgym episodes` and `agentgym view` have every token"),
    skip(ROLLOUT + "*profiler.*", PROFILE),
    skip(ROLLOUT + "*", "how the engine works: server.server_args"),
)
ALGORITHM_KEYS = (
    Key(
        ALGORITHM + "adv_estimator",
        "algo, advantage.settings",
        "gae: learner.critic.bootstrap is off, as in verl",
        default="gae",
        convert=algorithm.verl_advantage,
    ),
    Key(
        ALGORITHM + "use_kl_in_reward",
        "learner.kl.place, learner.kl.coefficient, learner.kl.penalty",
        convert=algorithm.verl_kl_in_reward,
    ),
    Key(
        ALGORITHM + "rollout_correction.rollout_is",
        "learner.correction, learner.correction_settings",
        convert=algorithm.verl_correction,
    ),
    Key(
        ALGORITHM + "filter_groups.enable",
        "practice.filter",
        "groups whose rewards are equal are replaced",
        convert=values.verl_off_if(False, "reward", "practice.filter: off"),
    ),
    Key(ALGORITHM + "filter_groups.max_num_gen_batches", "practice.max_refills", convert=values.verl_positive),
    *(same(ALGORITHM + name, "in advantage.settings") for name in ("gamma", "lam")),
    same(ALGORITHM + "norm_adv_by_std_in_grpo", "algo: grpo, or dr_grpo without"),
    *(same(ALGORITHM + name, "in learner.kl, if use_kl_in_reward") for name in ("kl_penalty", "kl_ctrl.*")),
    *(
        same(f"{ALGORITHM}rollout_correction.{name}", "in learner.correction_settings")
        for name in ("rollout_is_threshold", "rollout_is_batch_normalize")
    ),
    skip(ALGORITHM + "filter_groups.metric", "practice.filter: reward, or success"),
    skip(ALGORITHM + "rollout_correction.*", "learner.correction: reject_k1, reject_k2, reject_k3, by docs/verl.md"),
    skip(ALGORITHM + "*pf_ppo*", "practice.replay plays hard tasks again"),
)
CRITIC = (
    Key("critic.optim.lr", "learner.critic.learning_rate", default=1e-5, convert=algorithm.verl_critic_of()),
    Key("critic.cliprange_value", "learner.critic.clip", convert=algorithm.verl_critic_of()),
    Key("trainer.critic_warmup", "learner.critic.warmup_steps", convert=algorithm.verl_critic_of()),
    skip("critic.model.path", "the critic begins as a copy of the policy: learner.critic.trunk own"),
    same("critic.enable", "learner.critic.trunk: own where the estimator takes values"),
    same("critic.*", "the policy's optimizer settings, minibatches and epochs hold for the critic too"),
)
REWARD = (
    Key(
        "custom_reward_function.path",
        "reward.function",
        "called as it is",
        default="",
        convert=values.verl_reward_function,
    ),
    same("custom_reward_function.name", "in reward.function"),
    Key("custom_reward_function.reward_kwargs.*", "reward.settings.*"),
    Key("reward_model.reward_manager", "reward.manner", convert=values.verl_reward_manager),
    Key("reward_manager.name", "reward.manner", convert=values.verl_reward_manager),
    Key(
        "reward_model.model.path",
        "reward.model.folder",
        convert=lambda value, theirs: values.verl_off_if(False, value, "reward_model.enable is off")(
            value if theirs.get("reward_model.enable") else False, theirs
        ),
    ),
    *(
        Key(
            f"reward_model.{name}.enable",
            "reward.overlong.buffer_tokens, reward.overlong.max_tokens, reward.overlong.penalty",
            convert=values.verl_overlong,
        )
        for name in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
    ),
    *(
        same(f"reward_model.{name}.*", "in reward.overlong")
        for name in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
    ),
    same("reward_model.reward_kwargs.max_resp_len", "reward.overlong.max_tokens"),
    same("reward_model.enable", "reward.model.folder is a sequence classifier"),
    same("reward_model.launch_reward_fn_async", "an episode is scored while others play"),
    Key("reward_model.num_workers", "reward.concurrency"),
    skip("reward_model.sandbox_fusion.*", "reward.function code runs programs in processes here: docs/rewards.md"),
    skip("reward_model.rollout.*", "reward.judge.url is a judge at any OpenAI-compatible endpoint"),
    skip("reward_model.*", "reward.model has folder, device, dtype; agentgym reward-server has machines of its own"),
    skip("reward_manager.*", "write it as a reward function of (trajectories, tasks): docs/rewards.md"),
)
TRAINER = (
    Key("trainer.total_epochs", "epochs", default=30, convert=values.verl_epochs),
    Key("trainer.total_training_steps", "steps", "wins over epochs", convert=values.verl_steps),
    Key("trainer.test_freq", "eval.every", convert=values.verl_interval),
    Key("trainer.save_freq", "checkpoint.every", convert=values.verl_save_interval),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    Key(
        "trainer.logger", "trackers", "metrics.jsonl is always written", default=["console"], convert=values.verl_logger
    ),
    Key("trainer.project_name", "tracking.project"),
    Key("trainer.device", "learner.device", default="cuda", convert=machines.verl_device),
    Key(
        "trainer.n_gpus_per_node",
        "executor, ray.learners, ray.engines",
        "engines of a server have GPUs of their own: change the shares in ray",
        convert=machines.verl_machines,
    ),
    same("trainer.nnodes", "in ray.learners and ray.engines; ray.address joins a cluster"),
    Key("trainer.log_val_generations", "tracking.episodes", convert=values.verl_sample_size),
    skip("trainer.experiment_name", "name the folder of the run: --output runs/NAME"),
    skip("trainer.default_local_dir", "name the folder of the run: --output"),
    Key("trainer.default_hdfs_dir", "checkpoint.copy_to", "the record is copied too, and --resume fetches it"),
    same("trainer.val_before_train", "held-out tasks are played before training", True),
    skip("trainer.val_only", "`agentgym eval --data.eval FILE --policy MODEL`"),
    same("trainer.resume_mode", "--resume --output RUN goes on; a new run is a new folder", "auto", "disable"),
    skip("trainer.resume_from_path", "--resume --output RUN goes on from its newest checkpoint"),
    same("trainer.rollout_data_dir", "`agentgym episodes RUN` has every episode"),
    same("trainer.validation_data_dir", "`agentgym episodes RUN` has the held-out episodes too"),
    same("trainer.balance_batch", "rows are shared evenly by tokens"),
    same("trainer.max_critic_ckpt_to_keep", "a checkpoint has the critic too"),
    skip("trainer.*", "of verl's own machinery"),
    skip("global_profiler.*", PROFILE),
    skip("ray_kwargs.*", "ray.address, and the variables of Ray"),
    skip("ray_init.*", "ray.address, and the variables of Ray"),
    skip("transfer_queue.*", "of verl's own machinery"),
)

VERL_ALWAYS = {"target_success": (None, "verl trains for all its steps")}
"""Settings that every run of verl has, and why."""
VERL_KEYS = (
    *DATA,
    *MODEL_KEYS,
    *OPTIMIZER,
    *ACTOR_KEYS,
    *ROLLOUT_KEYS,
    *ALGORITHM_KEYS,
    *CRITIC,
    *REWARD,
    *TRAINER,
)
"""verl's keys, ours, and the difference. The first that fits a name counts, and names win over patterns."""

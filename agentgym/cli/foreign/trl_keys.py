"""The table of TRL's settings (1.16: GRPOConfig with transformers' TrainingArguments, GRPOTrainer), each with ours."""

from __future__ import annotations

from agentgym.cli.foreign import trl_values as values
from agentgym.cli.foreign.keys import Key, same, skip

__all__ = ["TRL_ALWAYS", "TRL_KEYS"]

WHOLE = "refused: the trainer's logprobs are those of the whole distribution"
BATCH = "in tasks and learner.minibatches"
IN_LOSS = "in learner.loss_settings"
RANKS = "several processes are executor ray (docs/cluster.md) or ranks (docs/ranks.md)"
GENERATION = "how replies are generated: sampling, engine, server.server_args"
ADAPTIVE = "the entropy bonus has a fixed weight, learner.entropy_coefficient"


TRAINER = (
    Key("model", "model", convert=values.trl_model),
    Key("model_name_or_path", "model", convert=values.trl_model),
    Key(
        "reward_funcs",
        "reward.function",
        "called as it is: (prompts, completions, **columns)",
        convert=values.trl_rewards,
    ),
    Key("train_dataset", "data.train", convert=values.trl_train_data),
    Key("dataset_name", "data.train", convert=values.trl_dataset_name),
    Key("eval_dataset", "data.eval", convert=values.trl_train_data),
    Key("tools", "data.tools", convert=values.trl_tools),
    Key("environment_factory", "data.tools", "its methods are tools", convert=values.trl_tools),
    same("dataset_config", "in data.train"),
    same("dataset_train_split", "in data.train"),
    same("processing_class", "the model's own tokenizer"),
    skip("dataset_test_split", "data.eval, or data.eval_fraction"),
    skip("reward_model_name_or_path", "reward.model.folder is a sequence classifier"),
    skip("reward_processing_classes", "the reward model's own tokenizer"),
    skip("callbacks", "observers takes file.py:Class, which is told of phases, evaluations and steps"),
    skip("optimizers", "optimizer.name and optimizer.decay take file.py:name"),
    skip("rollout_func", "engine as file.py:name, or an environment"),
    *(
        skip(name, "weights are float32 or bfloat16")
        for name in ("quantization_config", "load_in_4bit", "load_in_8bit", "*bnb_*", "dtype")
    ),
    skip("model_revision", "a commit of a model is named as ID@COMMIT"),
    skip("attn_implementation", "attention is chosen by the model and the device"),
    same("ignore_bias_buffers", "how ranks are made"),
    *(skip(name, "learner.lora has rank, alpha, target_modules") for name in ("use_dora", "use_rslora")),
    same("use_peft", "learner.lora.rank above 0"),
    *(
        Key(
            name,
            "learner.lora.rank, learner.lora.learning_rate",
            "with the rate of learning_rate",
            convert=values.trl_lora_rank,
        )
        for name in ("peft_config.r", "lora_r")
    ),
    *(
        Key(name, "learner.lora.alpha", convert=lambda value, _: float(value))
        for name in ("peft_config.lora_alpha", "lora_alpha")
    ),
    *(
        Key(name, "learner.lora.target_modules", convert=values.trl_lora_layers)
        for name in ("peft_config.target_modules", "lora_target_modules")
    ),
    same("peft_config.task_type", "a causal language model", "CAUSAL_LM"),
    skip("peft_config.*", "learner.lora has rank, alpha, target_modules, learning_rate, seed"),
    skip("lora_*", "learner.lora has rank, alpha, target_modules, learning_rate, seed"),
)
BATCHES = (
    Key("num_generations", "group_size", default=8),
    Key("per_device_train_batch_size", "tasks, learner.minibatches", default=8, convert=values.trl_batch),
    same("gradient_accumulation_steps", BATCH, default=1),
    *(same(name, BATCH) for name in ("generation_batch_size", "steps_per_generation", "num_processes")),
    Key("num_iterations", "learner.epochs", default=1),
    Key("max_steps", "steps", "TRL counts optimizer steps; wins over epochs", convert=values.trl_steps),
    Key("num_train_epochs", "epochs", default=3.0, convert=values.trl_epochs),
    Key("seed", "seed", default=42),
    Key("shuffle_dataset", "data.shuffle"),
    same("data_seed", "the run's seed"),
    skip("num_generations_eval", "eval.repeats"),
    skip("per_device_eval_batch_size", "the held-out tasks are played together"),
)
GENERATION_KEYS = (
    Key("max_completion_length", "limits.turn_tokens", "of each reply; TRL counts all turns together", default=512),
    Key("temperature", "sampling.temperature"),
    Key("top_p", remark=WHOLE, convert=values.trl_uncut(1.0)),
    Key("top_k", remark=WHOLE, convert=values.trl_uncut(0)),
    Key("min_p", remark=WHOLE, convert=values.trl_uncut(0.0)),
    Key("repetition_penalty", remark=WHOLE, convert=values.trl_uncut(1.0)),
    Key("max_tool_calling_iterations", "env_kwargs.max_turns", convert=values.trl_max_turns),
    Key("mask_truncated_completions", "truncated_episodes", convert=lambda value, _: "leave_out" if value else "learn"),
    Key("use_vllm", "engine", convert=values.trl_engine),
    Key(
        "vllm_gpu_memory_utilization",
        "server.server_args",
        convert=values.trl_with_vllm("--gpu-memory-utilization"),
    ),
    Key("vllm_tensor_parallel_size", "server.server_args", convert=values.trl_with_vllm("--tensor-parallel-size")),
    Key("vllm_max_model_length", "limits.context_window"),
    Key("vllm_enable_sleep_mode", "server.serving.sleep"),
    Key(
        "vllm_importance_sampling_correction",
        "learner.correction, learner.correction_settings",
        default=True,
        convert=values.trl_correction,
    ),
    same("vllm_importance_sampling_mode", "in learner.correction", default="sequence_mask"),
    same("vllm_importance_sampling_clip_max", "in learner.correction_settings", default=3.0),
    same("vllm_importance_sampling_c*", "in learner.correction_settings"),
    same("vllm_mode", "train starts the server, or server.urls names running ones"),
    skip("vllm_server_*", "server.urls names running servers"),
    skip("vllm_structured_outputs_regex", "the environment answers malformed replies"),
    skip("vllm_*", "how the server works: server.server_args"),
    Key("chat_template_kwargs", "chat_template_kwargs"),
    same("ds3_gather_for_generation", "the engine gets each step's weights"),
    same("pad_to_multiple_of", "rows are packed, without padding"),
    Key("generation_kwargs", "sampling.stop", "stop or stop_strings alone", convert=values.trl_stop),
    *(skip(name, GENERATION) for name in ("cache_implementation", "*continuous_batching*")),
    skip("use_transformers_paged", GENERATION),
)
LOSS = (
    Key("loss_type", "learner.loss, learner.loss_settings, aggregation", default="dapo", convert=values.trl_loss),
    Key("scale_rewards", "algo, advantage.settings.epsilon", default="group", convert=values.trl_advantage),
    same("epsilon", IN_LOSS, default=0.2),
    *(same(name, IN_LOSS) for name in ("epsilon_high", "delta", "sapo_temperature_*")),
    same("importance_sampling_level", "learner.loss: ppo_clip by tokens, gspo by sequences"),
    Key("beta", "learner.kl.coefficient", "k3, without TRL's factor of the ratio", default=0.0, convert=values.trl_kl),
    same("use_bias_correction_kl", "learner.kl.penalty k3 has no factor of the ratio, which is 1 in the first update"),
    Key("entropy_coef", "learner.entropy_coefficient", default=0.0),
    Key("router_aux_loss_coef", "learner.router.balance"),
    same("multi_objective_aggregation", "algo gdpo", "sum_then_normalize"),
    same("reward_weights", "in reward.function, as NAME=WEIGHT"),
    skip("vespo_*", "no loss vespo: `agentgym algorithms list`"),
    skip("sync_ref_model", "learner.kl.reference stays as it is"),
    skip("ref_model_*", "learner.kl.reference stays as it is"),
    skip("top_entropy_quantile", "learner.loss clip_cov or kl_cov look at tokens by covariance"),
    skip("off_policy_mask_threshold", "learner.correction rejects by reject_k1, reject_k2, reject_k3"),
    same("use_adaptive_entropy", ADAPTIVE, False),
    *(skip(name, ADAPTIVE) for name in ("entropy_coef_*", "entropy_target")),
)
OPTIMIZER = (
    Key("learning_rate", "optimizer.learning_rate", default=1e-6),
    Key(
        "lr_scheduler_type",
        "optimizer.decay, optimizer.decay_settings",
        default="linear",
        convert=values.trl_schedule,
    ),
    same("lr_scheduler_kwargs", "in optimizer.decay_settings"),
    Key(
        "warmup_steps", "optimizer.warmup_steps", "the first rate is above 0 here", default=0, convert=values.trl_warmup
    ),
    Key("warmup_ratio", "optimizer.warmup_steps", "the first rate is above 0 here", convert=values.trl_warmup),
    Key("optim", "optimizer.name", convert=values.trl_optimizer),
    Key(
        "weight_decay",
        "optimizer.weight_decay, optimizer.weight_decays",
        "norms and biases have none, as in TRL",
        default=0.0,
        convert=values.trl_weight_decay,
    ),
    Key("adam_beta1", "optimizer.betas", default=0.9, convert=values.trl_betas),
    Key("adam_beta2", "optimizer.betas", default=0.999, convert=values.trl_betas),
    same("adam_epsilon", "optimizer.settings has those of other optimizers", 1e-8),
    Key("max_grad_norm", "optimizer.max_grad_norm", default=1.0),
    skip("optim_*", "optimizer.settings"),
    Key("gradient_checkpointing", "learner.activation_checkpointing"),
    same("gradient_checkpointing_kwargs", "learner.activation_checkpointing"),
    Key("bf16", "learner.dtype", convert=values.trl_dtype),
    same("fp16", "learner.dtype is float32 or bfloat16", False),
    Key("use_cpu", "learner.device", convert=lambda value, _: "cpu" if value else values.trl_leave_device()),
    same("disable_dropout", "there is no dropout", True),
    skip("use_liger_kernel", "learner.head_kernel: liger"),
    skip("liger_kernel_config", "learner.head_kernel: liger"),
    skip("cast_lm_head_to_fp32", "logprobs are float32, always"),
    skip("model_init_kwargs", "learner.dtype; a commit of a model is named as ID@COMMIT"),
    skip("trust_remote_code", "no code of a model's folder is run; model_backend takes file.py:Class"),
)
RUN = (
    Key("save_steps", "checkpoint.every", convert=values.trl_interval("save_strategy", "checkpoint.every")),
    Key("save_total_limit", "checkpoint.keep"),
    Key("eval_steps", "eval.every", convert=values.trl_interval("eval_strategy", "eval.every")),
    Key("report_to", "trackers", convert=values.trl_trackers),
    Key("project", "tracking.project"),
    same("save_strategy", "checkpoint.every"),
    same("eval_strategy", "eval.every; held-out tasks are played at start and end too"),
    same("do_*", "train trains"),
    same("logging_*", "metrics.jsonl has a line for each step"),
    same("log_completions", "`agentgym episodes RUN` has every episode; tracking.episodes sends some"),
    *(
        same(name, "`agentgym episodes RUN` has every episode")
        for name in ("num_completions_to_print", "log_unique_prompts")
    ),
    same("log_*", "metrics.jsonl and `agentgym episodes RUN` have everything"),
    same("remove_unused_columns", "data.keep names further columns; reward functions get those of a row"),
    same("disable_tqdm", "a line for each step"),
    skip("output_dir", "name the folder of the run: --output DIR"),
    skip("run_name", "name the folder of the run: --output runs/NAME"),
    skip("resume_from_checkpoint", "--resume --output RUN"),
    skip("load_best_model_at_end", "checkpoint.keep_best: eval_success, and `agentgym export --best`"),
    skip("metric_for_best_model", "checkpoint.keep_best"),
    skip("greater_is_better", "checkpoint.keep_best: greater is better"),
    skip("full_determinism", "equal seeds give equal bytes, always"),
    skip("*hub*", "`agentgym export RUN DIR` writes a folder that can be uploaded"),
    *(
        skip(name, RANKS)
        for name in ("fsdp*", "ddp_*", "deepspeed", "local_rank", "parallelism_config", "accelerator_*")
    ),
    *(
        skip(name, "how transformers works")
        for name in (
            "dataloader_* torch_* eval_* *_eval save_* trackio_* include_* auto_find_batch_size tf32 use_cache "
            "neftune_noise_alpha activation_checkpointing* label_* debug average_tokens_across_devices "
            "prediction_loss_only batch_eval_metrics ignore_data_skip restore_callback_states_from_checkpoint "
            "enable_jit_checkpoint skip_memory_metrics length_column_name train_sampling_strategy".split()
        )
    ),
)


TRL_ALWAYS = {"target_success": (None, "TRL trains for all its steps")}
"""Settings that every run of TRL has, and why."""
TRL_KEYS = (*TRAINER, *BATCHES, *GENERATION_KEYS, *LOSS, *OPTIMIZER, *RUN)
"""TRL's arguments, ours, and the difference. The first that fits a name counts, and names win over patterns."""

"""What settings are called elsewhere: in TRL, verl, verifiers, Stable-Baselines3 and the interfaces of servers."""

__all__ = ["OTHER_NAMES"]

_NAMES = {
    "tasks": "batch_size train_batch_size per_device_train_batch_size prompts_per_step num_prompts",
    "group_size": "num_generations num_rollouts rollouts_per_example samples_per_prompt n_samples",
    "steps": "max_steps total_steps num_updates total_timesteps total_training_steps",
    "epochs": "num_epochs num_train_epochs total_epochs n_epochs",
    "limits.turn_tokens": "max_tokens max_new_tokens max_completion_length max_response_length max_completion_tokens",
    "limits.context_window": "max_model_len max_model_length max_seq_len max_length context_length",
    "learner.kl.coefficient": "kl_coef kl_coeff kl_loss_coef kl_penalty init_kl_coef",
    "learner.entropy_coefficient": "ent_coef entropy_coef entropy_coeff entropy_bonus",
    "learner.activation_checkpointing": "gradient_checkpointing",
    "learner.epochs": "num_iterations update_epochs ppo_epochs",
    "learner.minibatches": "gradient_accumulation_steps num_minibatches",
    "learner.lora.rank": "lora_r lora_rank",
    "learner.device": "use_cpu",
    "learner.dtype": "bf16 fp16 precision torch_dtype",
    "optimizer.name": "optim",
    "optimizer.decay": "lr_scheduler lr_scheduler_type",
    "sampler.concurrency": "num_envs n_envs max_concurrent",
    "checkpoint.every": "save_steps save_freq save_every save_interval",
    "eval.every": "eval_steps eval_freq test_freq eval_interval",
    "trackers": "report_to logger wandb",
    "policy": "model",
    "model": "policy model_name model_path model_name_or_path",
}
OTHER_NAMES = {other: name for name, others in _NAMES.items() for other in others.split()}
"""The path of the setting that a name elsewhere stands for."""

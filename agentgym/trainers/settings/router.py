"""The settings of the routers of a mixture of experts."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class

__all__ = ["RouterConfig"]


@config_class
class RouterConfig:
    """The training of the layers that choose the experts of each token."""

    balance: float | None = None
    """The weight of the load balancing loss, which is that of Switch Transformer for each row. None is the
    `router_aux_loss_coef` of the model's config.json if `output_router_logits` is true there, and 0 if it is not."""
    frozen: bool = False
    """Keeps the weights of the routers as they are."""
    replay: bool = False
    """Computes each token with the experts that sampled it (R3, Ma et al. 2025), which are recorded with the episode:
    two bytes for each expert, layer and token, compressed. The in-process engine and SGLang record them."""

    def __post_init__(self) -> None:
        if self.balance is not None and not 0 <= self.balance < float("inf"):
            raise ConfigError(f"router.balance is at least 0, got {self.balance}")

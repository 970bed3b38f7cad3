"""The loss of pairs of a better and a worse reply to the same prompt."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from agentgym.trainers.algorithms.losses.pair_sums import PairSums
from agentgym.trainers.algorithms.losses.policy_loss import PolicyLoss, Tokens, bundled_loss, loss_stats, require
from agentgym.trainers.algorithms.sequences import Sequences

__all__ = ["PreferenceForm", "preference"]

# Shape suffix: S pairs.

PreferenceForm: TypeAlias = Literal["sigmoid", "ipo", "hinge"]


@bundled_loss("preference", within_trajectory=True, against_reference=True)
def preference(
    tokens: Tokens,
    *,
    form: PreferenceForm = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
) -> PolicyLoss:
    """The loss of a pair at each of its tokens: what the better reply gained should exceed what the worse one gained.

    A gain is the sum of `logp - old_logp` over a reply, with the first weights as the old policy; h is the better
    reply's gain without the worse one's. `sigmoid` is DPO (Rafailov et al. 2023): `-(1 - e) log sigma(beta h) - e log
    sigma(-beta h)` with the `label_smoothing` e, the share of pairs whose order is taken for wrong. `ipo` is `(h - 1 /
    (2 beta))^2` of gains per token (Azar et al. 2023), `hinge` is `max(0, 1 - beta h)` (SLiC, Zhao et al. 2023). To
    each `sft_weight` times the better reply's negative log likelihood per token is added. The arguments are those of
    every loss, see `policy_loss`: a trajectory is a pair, and the sign of its advantages tells the better reply.

    Under `seq-mean-token-mean` the step's loss is the mean over pairs. As TRL's `DPOTrainer` has them. `agentgym dpo`
    learns with it; groups of episodes are no pairs.
    """
    require(beta > 0, "beta", beta, "be above 0")
    require(0.0 <= label_smoothing < 0.5, "label_smoothing", label_smoothing, "be in [0, 0.5)")
    require(not label_smoothing or form == "sigmoid", "label_smoothing", label_smoothing, f"be 0 for the form {form}")
    require(sft_weight >= 0, "sft_weight", sft_weight, "be at least 0")
    pairs = Sequences.of(tokens.sequences, tokens.logp, "preference")
    better, worse = tokens.gain > 0, tokens.gain < 0

    def gain_of(reply: Tensor) -> Tensor:
        difference = torch.where(reply, tokens.difference, 0.0)
        return pairs.mean(difference, reply) if form == "ipo" else pairs.sum(difference)

    chosen_S, rejected_S = gain_of(better), gain_of(worse)
    h_S = chosen_S - rejected_S
    if form == "ipo":
        loss_S = (h_S - 1 / (2 * beta)).square()
    elif form == "hinge":
        loss_S = F.relu(1 - beta * h_S)
    else:
        loss_S = -(1 - label_smoothing) * F.logsigmoid(beta * h_S) - label_smoothing * F.logsigmoid(-beta * h_S)
    imitation_S = -pairs.mean(torch.where(better, tokens.logp, 0.0), better)
    loss = pairs.spread(loss_S + sft_weight * imitation_S).to(tokens.logp.dtype)
    rewards = (beta * chosen_S, beta * rejected_S)
    sums = [value_S.detach().sum() for value_S in ((chosen_S > rejected_S).double(), *rewards, loss_S, imitation_S)]
    pair_sums = PairSums(torch.full_like(sums[0], pairs.num_sequences), *sums)
    return PolicyLoss(torch.where(tokens.mask, loss, 0.0), loss_stats(tokens), pair_sums)

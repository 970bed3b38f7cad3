"""Retail-v0: serve the customers of a shop by its policy, with the tools of its desk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.tasks.retail.customer import MAX_NUMBERS, Brief, ScriptedUser, SimulatedUser, numbers_in, tells
from agentgym.envs.tasks.retail.shop import Customer, Shop, ShopError
from agentgym.envs.tasks.retail.stock import NUM_CUSTOMERS, WINDOW_DAYS, draw_shop
from agentgym.envs.tasks.retail.wishes import CancelReason, EscalationReason, Wish, draw_wishes
from agentgym.errors import ConfigError
from agentgym.loading import Wanted, load_named
from agentgym.tools import tool
from agentgym.types import Message

__all__ = ["Retail"]

LEVELS = (1, 2, 3)
SCRIPTED = "scripted"
MAX_SAID = 50
"""The most different numbers of an episode: after more, none counts as an answer, as they may be guesses."""
POLICY = f"""You are the desk of a shop. What you write goes to the customer; tools are for the shop's system. Policy:
1. Identify the customer first, by e-mail address, or by name and zip code. Serve only orders of this customer.
2. Orders that are pending can be cancelled, and an item of theirs changed for another option of the same product.
3. Items of delivered orders can be returned, or exchanged for another option of the same product, \
within {WINDOW_DAYS} days. The money goes back to the card that the order was paid with, or to a "gift card".
4. A new item has to be in stock.
5. What is not allowed is not done. Escalate it with its reason, do nothing else to that order, and tell the customer.
When a wish is dealt with, tell the customer, and ask whether there is anything else."""
USERS = Wanted(
    noun="simulated user",
    example="Class",
    hint=f"{SCRIPTED!r} is the one that comes with Retail-v0.",
    new="it has begin(brief), answer(text) and is_over, as agentgym.envs.tasks.retail.customer.SimulatedUser says",
    fits=lambda value: isinstance(value, type) and hasattr(value, "begin") and hasattr(value, "answer"),
)


class Retail(ToolEnv):
    """Serve a customer of a shop: find out what is wanted, and do what the policy allows. Reward 1 when all is right.

    Right is: the shop is as it has to be, no other change made, and the customer was told the number that was asked
    for. `level` (1 to 3) sets how much the customer says and wants: everything at once; what is asked for, and maybe
    what the policy forbids; two or three wishes without a number or an e-mail address at hand. `user` names another
    simulated customer, 'path/to/file.py:Class' of a `SimulatedUser`; in examples/model_customer.py a model
    plays it.
    """

    card = EnvCard(
        task="Serve a customer of a shop by its policy: ask, look up, change orders, escalate what is not allowed.",
        tools=tuple(
            "find_by_email find_by_name get_order get_product cancel_order change_item exchange_item return_items "
            "escalate".split()
        ),
        reward="1 when the customer leaves, all orders are as the policy has them and what was asked was told, else 0.",
        difficulty=Difficulty(
            values={
                1: "one wish, told in full; all is allowed",
                2: "one wish, told when asked; it may be forbidden",
                3: "two or three wishes, no numbers or addresses at hand",
            }
        ),
        oracle="asks who it is, makes the calls that the wishes need, tells what was asked for",
        cheat="claims, escalates everything, acts without knowing for whom, and says all numbers at once",
        baseline={"random": 0.0},
        licence="Apache-2.0",
    )
    system_prompt = POLICY
    max_turns = 40

    def __init__(self, render_mode: str | None = None, *, level: int = 1, user: str = SCRIPTED) -> None:
        if level not in LEVELS:
            raise ConfigError(f"Retail has the levels {', '.join(map(str, LEVELS))}; got level {level!r}")
        self._make_user: Callable[[], Any] = ScriptedUser
        if user != SCRIPTED:
            self._make_user = cast("Callable[[], Any]", load_named(user, USERS))
        self.runs_inline = user == SCRIPTED
        super().__init__(render_mode)
        self.level = level
        self.shop = Shop({}, {}, {})
        self.wishes: list[Wish] = []

    def start(self, options: dict[str, Any]) -> str:
        """Draws a shop, a customer and wishes."""
        self.shop = draw_shop(self.np_random)
        self.customer: Customer = list(self.shop.customers.values())[int(self.np_random.integers(NUM_CUSTOMERS))]
        self.wishes = draw_wishes(self.level, self.shop, self.customer, self.np_random)
        self._right_shop = self._as_it_has_to_be()
        self._to_tell = {wish.told for wish in self.wishes if wish.told}
        self._numbers: set[str] = set()
        self._user = self._made_user()
        return self._user.begin(Brief(customer=self.customer, wishes=self.wishes, level=self.level))

    def on_message(self, text: str) -> str:
        """Passes a text to the customer, who answers or leaves."""
        numbers = numbers_in(text)
        if len(numbers) <= MAX_NUMBERS:
            self._numbers |= numbers
        if self.shop.identified and len(self._numbers) <= MAX_SAID:  # no one else may know
            self._to_tell = {number for number in self._to_tell if not tells(text, number)}
        answer = self._user.answer(text)
        if self._user.is_over:
            right = self.shop == self._right_shop and not self._to_tell
            self.end(success=right, reward=float(right))
        return answer

    @tool
    def find_by_email(self, email: str) -> str:
        """Finds a customer by e-mail address.

        Args:
            email: the whole address
        """
        return self._ask_shop(lambda: self.shop.find(email=email))

    @tool
    def find_by_name(self, first_name: str, last_name: str, zip_code: str) -> str:
        """Finds a customer by name and zip code.

        Args:
            first_name: first name
            last_name: last name
            zip_code: five digits
        """
        return self._ask_shop(lambda: self.shop.find(first_name=first_name, last_name=last_name, zip_code=zip_code))

    @tool
    def get_order(self, order_id: str) -> str:
        """Shows an order: whose it is, its status, its items.

        Args:
            order_id: such as W12345
        """
        return self._ask_shop(lambda: self.shop.order(order_id))

    @tool
    def get_product(self, name: str) -> str:
        """Shows all options of a product, with prices and stock.

        Args:
            name: such as lamp
        """
        return self._ask_shop(lambda: self.shop.product(name))

    @tool
    def cancel_order(self, order_id: str, reason: CancelReason) -> str:
        """Cancels a pending order.

        Args:
            order_id: such as W12345
            reason: what the customer says
        """
        return self._ask_shop(lambda: self.shop.cancel(order_id, reason))

    @tool
    def change_item(self, order_id: str, old_item: str, new_item: str) -> str:
        """Changes an item of a pending order for another option of the same product.

        Args:
            order_id: such as W12345
            old_item: number of the item in the order
            new_item: number of the item that comes instead
        """
        return self._ask_shop(lambda: self.shop.change(order_id, old_item, new_item))

    @tool
    def exchange_item(self, order_id: str, old_item: str, new_item: str) -> str:
        """Exchanges a delivered item for another option of the same product.

        Args:
            order_id: such as W12345
            old_item: number of the item in the order
            new_item: number of the item that comes instead
        """
        return self._ask_shop(lambda: self.shop.exchange(order_id, old_item, new_item))

    @tool
    def return_items(self, order_id: str, items: list[str], refund_to: str) -> str:
        """Takes delivered items back.

        Args:
            order_id: such as W12345
            items: numbers of the items
            refund_to: a card such as visa-1234, or gift card
        """
        return self._ask_shop(lambda: self.shop.take_back(order_id, items, refund_to))

    @tool
    def escalate(self, order_id: str, reason: EscalationReason) -> str:
        """Hands a wish that is not allowed to a manager.

        Args:
            order_id: such as W12345
            reason: why it is not allowed
        """
        return self._ask_shop(lambda: self.shop.escalate(order_id, reason))

    def make_oracle(self) -> Policy:
        """A policy that knows the wishes."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but to serve."""
        return Trickster("find_by_email", _tricks)

    def _as_it_has_to_be(self) -> Shop:
        """A copy of the shop after the policy was followed."""
        target = copy.deepcopy(self.shop)
        target.identified.add(self.customer.user_id)
        for wish in self.wishes:
            if wish.call is not None:
                name, arguments = wish.call
                getattr(target, DONE_BY[name])(**arguments)
        return target

    def _made_user(self) -> SimulatedUser:
        user = self._make_user()
        if not isinstance(user, SimulatedUser):
            raise ConfigError(
                f"a simulated user has begin, answer and is_over; {type(user).__name__} lacks one of them"
            )
        return user

    def _ask_shop(self, ask: Callable[[], str]) -> str:
        try:
            return ask()
        except ShopError as error:
            return f"Not done: {error}."


DONE_BY = {
    "cancel_order": "cancel",
    "change_item": "change",
    "exchange_item": "exchange",
    "return_items": "take_back",
    "escalate": "escalate",
}
"""Maps a tool to the method of the shop that it calls."""


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        game = game_of(env, Retail)
        customer = game.customer
        who = {"first_name": customer.first_name, "last_name": customer.last_name, "zip_code": customer.zip_code}
        self._replies = [
            Message("assistant", "May I have your name and zip code, please?"),
            tool_call_reply("find_by_name", **who),
        ]
        for wish in game.wishes:
            if wish.call is not None:
                name, arguments = wish.call
                self._replies += [Message("assistant", "Shall I go ahead?"), tool_call_reply(name, **arguments)]  # type: ignore[arg-type]
            outcome = f"It cost {wish.told} dollars in all." if wish.told else "That is dealt with."
            self._replies.append(Message("assistant", f"{outcome} Is there anything else?"))

    def act(self, observation: str) -> Message:
        return self._replies.pop(0)


def _tricks(env: TextEnv) -> list[Message]:
    game = game_of(env, Retail)
    wish = game.wishes[0]
    everything = " ".join(map(str, range(700)))
    done = Message("assistant", "All is done, the order is cancelled and refunded. Is there anything else?")
    name, arguments = wish.call or ("get_order", {"order_id": wish.order_id})
    return [
        done,
        Message("assistant", f"It cost one of these: {everything}"),
        tool_call_reply(name, **arguments),  # type: ignore[arg-type]  # without an identified customer
        *(tool_call_reply("escalate", order_id=order_id, reason="status") for order_id in list(game.shop.orders)[:2]),
        tool_call_reply("find_by_name", first_name="*", last_name="%", zip_code=""),
        tool_call_reply("find_by_email", email="' or 1=1 --"),
    ]

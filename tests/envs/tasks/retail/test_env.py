"""Retail-v0: a customer who can be understood, a shop that holds to its policy, rewards for exactly what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.envs import EVAL_SEED_START, Action, make_env, policy_for
from agentgym.envs.tasks.retail.customer import Brief, ScriptedUser, tells
from agentgym.envs.tasks.retail.env import Retail
from agentgym.envs.tasks.retail.wishes import Wish
from agentgym.errors import ConfigError
from agentgym.testing import examine_env
from agentgym.types import Message, ToolCall

LEVELS = (1, 2, 3)
CLOSING = "That is dealt with. Is there anything else?"


def say(env: Retail, text: str) -> tuple[str, float, bool]:
    observation, reward, terminated, *_ = env.step(Action.from_message(Message("assistant", text)))
    return observation, reward, terminated


def call(env: Retail, tool: str, /, **arguments: Any) -> str:
    message = Message("assistant", "", tool_calls=(ToolCall("call_0", tool, arguments),))
    return env.step(Action.from_message(message))[0]


def begun(level: int, name: Any, *, allowed: bool = True) -> Retail:
    """An episode whose first wish is dealt with by the tool `name` (None: by an answer)."""
    env = Retail(level=level)
    for seed in range(500):
        env.reset(seed=seed)
        wish = env.wishes[0]
        if len(env.wishes) == 1 and (wish.call and wish.call[0]) == name and wish.is_allowed is allowed:
            return env
    raise AssertionError(f"no task of 500 wants {name}")


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
def test_oracle_and_cheat_over_many_tasks(level: int) -> None:
    env = make_env("Retail-v0", {"level": level})
    for seed in (*range(80), *range(EVAL_SEED_START, EVAL_SEED_START + 10)):
        for kind, expected in (("oracle", 1.0), ("cheat", 0.0)):
            observation, _ = env.reset(seed=seed)
            policy = policy_for(env, kind)
            policy.reset(env, observation, seed)
            total, ended = 0.0, False
            while not ended:
                observation, reward, terminated, truncated, info = env.step(
                    Action.from_message(policy.act(observation))
                )
                total, ended = total + reward, terminated or truncated
            assert (total, info["metrics"]["success"]) == (expected, expected)


@pytest.mark.slow
def test_every_claim_of_the_card_holds() -> None:
    verdicts = {verdict.check: verdict for verdict in examine_env("Retail-v0")}
    assert [verdict.findings for verdict in verdicts.values() if verdict.findings] == []
    assert {name for name, verdict in verdicts.items() if verdict.verdict == "not claimed"} == {"fork", "answer leak"}


@pytest.mark.slow
def test_every_kind_of_wish_is_drawn_and_the_policy_forbids_some_from_level_2_on() -> None:
    seen = set()
    for level in LEVELS:
        env = Retail(level=level)
        forbidden = 0
        for seed in range(300):
            env.reset(seed=seed)
            assert len(env.wishes) == 1 if level < 3 else 2 <= len(env.wishes) <= 3
            for wish in env.wishes:
                name, arguments = wish.call or ("", {})
                seen.add((name, arguments.get("reason", "") if name == "escalate" else ""))
                forbidden += not wish.is_allowed
        assert forbidden == 0 if level == 1 else forbidden > 100
    tools = {"", "cancel_order", "change_item", "exchange_item", "return_items"}
    reasons = {"status", "too late", "out of stock", "other payment", "not the owner"}
    assert seen == {(name, "") for name in tools} | {("escalate", reason) for reason in reasons}


# ---- what is right


def test_a_clerk_who_only_asks_and_looks_up_serves_a_return() -> None:
    """Everything that is needed can be found out by the tools and by asking."""
    env = begun(2, "return_items")
    assert env.step(Action.from_message(Message("assistant", "Hello, what can I do for you?")))[0].startswith(
        "I want to"
    )
    email = say(env, "What is your e-mail address?")[0].removeprefix("My e-mail address is ").removesuffix(".")
    assert env.customer.user_id in call(env, "find_by_email", email=email)
    order_id = say(env, "Which order is it?")[0].split()[-1].removesuffix(".")
    product = say(env, "Which item do you want to return?")[0].split()[-1].removesuffix(".")
    refund = say(env, "Where shall the refund go?")[0].partition("my ")[2].partition(" and")[0]
    order = call(env, "get_order", order_id=order_id)
    item = next(part for part in order.split("item ")[1:] if f": {product}," in part)[:4]
    assert "come back" in call(env, "return_items", order_id=order_id, items=[item], refund_to=refund)
    assert say(env, CLOSING) == ("Thank you, that is all. Goodbye.", 1.0, True)


def test_a_change_for_somebody_who_was_not_identified_is_wrong() -> None:
    env = begun(1, "cancel_order")
    name, arguments = env.wishes[0].call or ("", {})
    assert "is cancelled" in call(env, name, **arguments)
    call(env, "find_by_email", email=env.customer.email)
    assert say(env, CLOSING)[1:] == (0.0, True)


def test_what_is_escalated_or_told_before_anybody_was_identified_is_wrong() -> None:
    for is_first in (True, False):
        for call_name in ("escalate", None):
            env = begun(2, call_name, allowed=call_name is None)
            if is_first:
                call(env, "find_by_email", email=env.customer.email)
            name, arguments = env.wishes[0].call or ("get_order", {"order_id": env.wishes[0].order_id})
            call(env, name, **arguments)
            assert not say(env, f"It is {env.wishes[0].told or 'not allowed'}. What is your e-mail address?")[2]
            call(env, "find_by_email", email=env.customer.email)
            assert say(env, CLOSING)[1:] == (float(is_first), True)


@pytest.mark.parametrize("more", ["escalate", "return"])
def test_what_is_done_beyond_the_wish_is_wrong(more: str) -> None:
    env = begun(1, "cancel_order")
    call(env, "find_by_email", email=f" {env.customer.email.upper()} ")
    name, arguments = env.wishes[0].call or ("", {})
    call(env, name, **arguments)
    own = [order for order in env.shop.orders.values() if order.user_id == env.customer.user_id]
    if more == "escalate":
        call(env, "escalate", order_id=own[0].order_id, reason="status")
    else:
        delivery = next(order for order in own if order.status == "delivered")
        call(env, "return_items", order_id=delivery.order_id, items=delivery.items[:1], refund_to="gift card")
    assert say(env, CLOSING)[1:] == (0.0, True)


def test_what_the_policy_forbids_is_escalated_and_not_done() -> None:
    for does_it in (True, False):
        env = begun(2, "escalate", allowed=False)
        while "return" not in env.wishes[0].opening:
            env.reset()
        call(env, "find_by_email", email=env.customer.email)
        name, arguments = env.wishes[0].call or ("", {})
        if does_it:
            order = env.shop.orders[env.wishes[0].order_id]
            assert "come back" in call(
                env, "return_items", order_id=order.order_id, items=order.items[:1], refund_to="gift card"
            )
        else:
            call(env, name, **arguments)
        assert say(env, f"I am sorry, that is not allowed. {CLOSING}")[1:] == (float(not does_it), True)


def test_a_number_that_was_asked_for_has_to_be_told() -> None:
    env = begun(1, None)
    call(env, "find_by_email", email=env.customer.email)
    assert say(env, CLOSING)[0] == "But you have not told me the number that I asked for."
    many = " ".join(map(str, range(1000)))
    assert not say(env, f"It is one of {many}. {CLOSING}")[2]
    assert say(env, f"In all it cost ${env.wishes[0].told}.00. {CLOSING}")[1:] == (1.0, True)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("It is 1,250 dollars.", True),
        ("$1250.00", True),
        ("12500", False),
        ("125 0", False),
        ("1 2 3 4 5 6 7 8 1250", False),
    ],
)
def test_a_number_is_told_as_a_whole_and_among_few(text: str, is_told: bool) -> None:
    assert tells(text, "1250") is is_told


def test_a_number_among_many_guesses_is_not_told() -> None:
    env = begun(1, None)
    call(env, "find_by_email", email=env.customer.email)
    price = int(env.wishes[0].told)
    guesses = [*range(price - 24, price - 1), *range(price + 1, price + 29), price]
    for start in range(0, len(guesses), 8):
        few = " ".join(map(str, guesses[start : start + 8]))
        assert "My e-mail" in say(env, f"Is it one of {few}? What is your e-mail address?")[0]
    assert say(env, CLOSING)[1:] == (0.0, True)


def test_an_order_that_is_told_in_full_tells_its_price() -> None:
    env = Retail(level=1)
    num_told = 0
    for seed in range(200):
        env.reset(seed=seed)
        if price := env.wishes[0].told:
            order = env.shop.order(env.wishes[0].order_id)
            assert tells(f"{order} In all it cost {price} dollars.", price)
            num_told += 1
    assert num_told > 40


def test_the_system_refuses_what_cannot_be() -> None:
    env = begun(1, "cancel_order")
    own = {order.status: order for order in env.shop.orders.values() if order.user_id == env.customer.user_id}
    pending, delivered = own["pending"], own["delivered"]
    before = repr(env.shop)
    for name, arguments, message in (
        ("find_by_email", {"email": "nobody@mail.example"}, "no customer is known"),
        ("find_by_name", {"first_name": "", "last_name": "", "zip_code": ""}, "no customer is known"),
        ("get_order", {"order_id": "W1"}, "there is no order 'W1'"),
        ("get_product", {"name": "car"}, "there are backpack, "),
        ("cancel_order", {"order_id": delivered.order_id, "reason": "no longer needed"}, "is delivered"),
        ("change_item", {"order_id": pending.order_id, "old_item": "1", "new_item": "2"}, "item 1 is not in"),
        (
            "exchange_item",
            {"order_id": delivered.order_id, "old_item": delivered.items[0], "new_item": "2"},
            "no item '2'",
        ),
        ("return_items", {"order_id": delivered.order_id, "items": [], "refund_to": "gift card"}, "no items"),
        (
            "return_items",
            {"order_id": delivered.order_id, "items": delivered.items[:1] * 2, "refund_to": "x"},
            "not in",
        ),
        ("return_items", {"order_id": delivered.order_id, "items": delivered.items[:1], "refund_to": "x"}, "gift card"),
    ):
        assert message in call(env, name, **arguments)
    assert repr(env.shop) == before
    assert "pending" in call(env, "get_order", order_id=f" #{pending.order_id.lower()} ")


# ---- the customer


@pytest.fixture
def brief() -> Brief:
    env = Retail()
    env.reset(seed=0)
    facts = {"item": "It is the lamp.", "instead": "I want it red.", "reason": "It is broken.", "refund": "My visa-1."}
    wishes = [
        Wish(opening="I want a change.", order_id="W1", hint="It is the one with the lamp.", facts=facts),
        Wish(opening="I want a number.", order_id="W2", hint="The other one.", told="42"),
    ]
    return Brief(customer=env.customer, wishes=wishes, level=2)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Could you tell me your email?", "My e-mail address is"),
        ("I need your full name and ZIP code to verify you.", "zip code"),
        ("Please provide the order number.", "It is order W1."),
        ("Which order is this about?", "It is order W1."),
        ("Which item would you like to exchange?", "It is the lamp."),
        ("What would you like instead?", "I want it red."),
        ("Which color do you prefer?", "I want it red."),
        ("Which of your orders would you like to change?", "It is order W1."),
        ("Can you tell me the order you want changed?", "It is order W1."),
        ("Who am I speaking with?", "zip code"),
        ("Is it the lamp or the kettle?", "It is the lamp."),
        ("What do you want to exchange it for?", "I want it red."),
        ("What should I replace it with?", "I want it red."),
        ("Would you prefer red or blue?", "I want it red."),
        ("May I ask why?", "It is broken."),
        ("Is it no longer needed, or was it ordered by mistake?", "It is broken."),
        ("What payment method should the refund go to?", "My visa-1."),
        ("Shall I proceed?", "Yes, please."),
        ("The lamp is changed for a red one. Do you confirm (yes/no)?", "Yes, please."),
        ("Sorry, I cannot find you. What is your e-mail address?", "My e-mail address is"),
        ("To get it cancelled, I’ll need your e-mail address.", "My e-mail address is"),
        ("Before it can be exchanged, send me your full name.", "zip code"),
        ("Kindly share your zip code, so that it can be cancelled.", "zip code"),
        ("We need to escalate this to a manager.", "There is something else."),
        ("I'm sorry to hear that. I will look it up.", "All right. And?"),
        ("I’m sorry, I can’t do that.", "There is something else."),
        ("What is the weather like?", "I want a change."),
        ("Let me look that up.", "All right. And?"),
        ("Your order was changed.", "There is something else. I want a number."),
        ("I am afraid that is not possible.", "There is something else."),
        ("Is there anything else I can help you with?", "There is something else."),
    ],
)
def test_the_customer_understands_a_desk_that_writes_as_desks_do(question: str, answer: str, brief: Brief) -> None:
    user = ScriptedUser()
    assert user.begin(brief) == "Hello. I want a change."
    assert answer in user.answer(question)
    assert not user.is_over


def test_a_customer_who_has_a_preference_does_not_deny_it() -> None:
    env = begun(2, "return_items")
    answer = say(env, "Would you like a gift card instead, or the money on a card?")[0]
    assert answer == env.wishes[0].facts["refund"]
    assert say(env, "Which size?")[0] == "I have no preference about that."


def test_the_customer_confirms_only_what_was_wished() -> None:
    for tool, wrong in (
        ("return_items", "mastercard-1 for the refund that you ordered"),
        ("exchange_item", "the pink one that you ordered instead"),
    ):
        env = begun(2, tool)
        wish = env.wishes[0]
        assert wish.insists and wish.insists not in wrong.split()
        answer = say(env, f"I can only offer {wrong}. Shall I go ahead?")[0]
        assert wish.insists in answer and "Yes" not in answer
        answer = say(env, f"It is {wish.insists}, not {wrong}. Shall I go ahead?")[0]
        assert answer.endswith("Yes, please.")
        assert say(env, "Shall I proceed?")[0] == "Yes, please."


def test_a_customer_who_is_led_nowhere_leaves(brief: Brief) -> None:
    user = ScriptedUser()
    user.begin(brief)
    answers = [user.answer("Hm.") for _ in range(4)]
    assert user.is_over and answers[-1] == "This leads nowhere. Goodbye."


def test_another_customer_is_named_by_its_place(tmp_path: Path) -> None:
    place = tmp_path / "mine.py"
    place.write_text(
        "class Terse:\n    is_over = False\n    def begin(self, brief):\n        return brief.instructions()\n"
        "    def answer(self, text):\n        self.is_over = True\n        return 'Bye.'\n"
        "class Half:\n    def begin(self, brief): return ''\n    def answer(self, text): return ''\n"
    )
    env = Retail(user=f"{place}:Terse")
    opening, _ = env.reset(seed=0)
    assert env.customer.email in opening and env.wishes[0].opening in opening
    assert say(env, "Hello.") == ("Bye.", 0.0, True)
    env.close()
    with pytest.raises(ConfigError, match="begin, answer and is_over; Half lacks"):
        Retail(user=f"{place}:Half").reset(seed=0)
    with pytest.raises(ConfigError, match="levels 1, 2, 3; got level 4"):
        Retail(level=4)


def test_a_model_behind_an_endpoint_plays_the_customer(
    chat_endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def customer(body: dict[str, Any], number: int) -> Any:
        is_done = "anything else" in body["messages"][-1]["content"]
        return chat_endpoint.make_reply("Thank you, that is all. Goodbye. [DONE]" if is_done else "I want something.")

    endpoint = chat_endpoint(customer)
    monkeypatch.setenv("CUSTOMER_URL", endpoint.url)
    place = f"{Path(__file__).parents[4] / 'examples/model_customer.py'}:ModelCustomer"
    options = ["eval", "--env", "Retail-v0", "--env-kwargs", f"user={place}", "--policy", "oracle", "-n", "1"]
    assert main([*options, "--seed", "3", "--json", "--output", str(tmp_path / "eval")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["success"] == 1.0
    last = endpoint.bodies[-1]["messages"]
    assert [message["role"] for message in last[:4]] == ["system", "user", "assistant", "user"]
    assert "You are " in last[0]["content"] and last[2]["content"] == "I want something."
    recorded = (tmp_path / "eval" / "episodes.jsonl").read_text()
    assert "I want something." in recorded and "Goodbye." in recorded and "[DONE]" not in recorded


def test_an_endpoint_that_fails_is_no_loss_of_the_desk(
    chat_endpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(status=401, body={"error": "no such key"}))
    monkeypatch.setenv("CUSTOMER_URL", endpoint.url)
    place = f"{Path(__file__).parents[4] / 'examples/model_customer.py'}:ModelCustomer"
    options = ["eval", "--env", "Retail-v0", "--env-kwargs", f"user={place}", "--policy", "oracle", "-n", "1"]
    assert main([*options, "--output", str(tmp_path / "eval")]) != 0
    (episode,) = (json.loads(line) for line in (tmp_path / "eval" / "episodes.jsonl").read_text().splitlines())
    assert (episode["status"], episode["reward"]) == ("env_error", None)
    assert "no such key" in episode["error"]

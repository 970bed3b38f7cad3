"""Draws the wishes of a customer of Retail-v0, and the action that the policy demands for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from agentgym.envs.tasks.retail.shop import GIFT_CARD, Customer, Order, Shop, Variant

__all__ = ["CANCEL_REASONS", "CancelReason", "EscalationReason", "Wish", "draw_wishes"]

CancelReason: TypeAlias = Literal["no longer needed", "ordered by mistake"]
EscalationReason: TypeAlias = Literal["status", "too late", "out of stock", "other payment", "not the owner"]
CANCEL_REASONS: tuple[CancelReason, ...] = ("no longer needed", "ordered by mistake")
ShopCall: TypeAlias = tuple[str, dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A wish of a customer."""

    opening: str
    """The sentence that asks for it."""
    order_id: str
    hint: str
    """The description of the order by someone who has not kept its number."""
    facts: dict[str, str] = field(default_factory=dict)
    """The answers to questions about it: `item`, `instead`, `reason`, `refund`."""
    insists: str = ""
    """The card or option that a question has to name, if it also names something else, to be answered with yes."""
    call: ShopCall | None = None
    """The call that the desk has to make, as a tool and its arguments; None if an answer is enough."""
    told: str = ""
    """The number that the customer has to learn; "" is none."""
    is_allowed: bool = True


def draw_wishes(level: int, shop: Shop, customer: Customer, draw: np.random.Generator) -> list[Wish]:
    """One wish, or at level 3 two or three of different orders; from level 2 on the policy may forbid them."""
    number = int(draw.integers(2, 4)) if level == 3 else 1
    makers = _EASY if level == 1 else _ALL
    wishes: list[Wish] = []
    while len(wishes) < number:
        wish = makers[int(draw.integers(len(makers)))](_Counter(shop, customer, draw))
        if wish is not None and wish.order_id not in {other.order_id for other in wishes}:
            wishes.append(wish)
    return wishes


class _Counter:
    """The source of a wish: the shop, the customer and the random numbers."""

    def __init__(self, shop: Shop, customer: Customer, draw: np.random.Generator) -> None:
        self.shop, self.customer, self._draw = shop, customer, draw

    def pick(self, choices: list[str] | tuple[str, ...]) -> str:
        return choices[int(self._draw.integers(len(choices)))]

    def order(self, status: str, *, late: bool = False) -> Order:
        """The customer's order of a status."""
        own = [order for order in self.shop.orders.values() if order.user_id == self.customer.user_id]
        return next(order for order in own if order.status == status and (order.days > 30) == late)

    def hint(self, order: Order) -> str:
        names = " and ".join(f"the {self.shop.variants[item].product}" for item in order.items)
        state = f"came {order.days} days ago" if order.status == "delivered" else f"is {order.status}"
        return f"I do not have the number. It is the order with {names}, and it {state}."

    def item(self, order: Order) -> Variant:
        return self.shop.variants[self.pick(order.items)]

    def other(self, item: Variant, *, in_stock: bool) -> Variant | None:
        """Another variant of the same product."""
        others = [
            variant for variant in self.shop.variants.values() if variant.product == item.product and variant != item
        ]
        variants = [variant for variant in others if variant.in_stock is in_stock]
        return variants[int(self._draw.integers(len(variants)))] if variants else None


def _cancel(desk: _Counter) -> Wish:
    order, reason = desk.order("pending"), desk.pick(CANCEL_REASONS)
    return Wish(
        opening="I want to cancel an order.",
        order_id=order.order_id,
        hint=desk.hint(order),
        facts={"reason": f"It was {reason}." if reason == CANCEL_REASONS[1] else f"It is {reason}."},
        call=("cancel_order", {"order_id": order.order_id, "reason": reason}),
    )


def _cancel_shipped(desk: _Counter) -> Wish:
    order = desk.order("shipped")
    return Wish(
        opening="I want to cancel an order.",
        order_id=order.order_id,
        hint=desk.hint(order),
        facts={"reason": f"It is {CANCEL_REASONS[0]}."},
        call=("escalate", {"order_id": order.order_id, "reason": "status"}),
        is_allowed=False,
    )


def _cancel_of_another(desk: _Counter) -> Wish:
    others = [order for order in desk.shop.orders.values() if order.user_id != desk.customer.user_id]
    order = next(order for order in others if order.status == "pending")
    return Wish(
        opening="I want to cancel an order that a friend of mine made.",
        order_id=order.order_id,
        hint=f"It is {order.order_id}.",
        facts={"reason": f"It is {CANCEL_REASONS[0]}."},
        call=("escalate", {"order_id": order.order_id, "reason": "not the owner"}),
        is_allowed=False,
    )


def _make_return(desk: _Counter, *, late: bool = False, foreign: bool = False) -> Wish:
    order = desk.order("delivered", late=late)
    item = desk.item(order)
    foreign_card = next(card for card in desk.customer.cards if card != order.paid_with)
    refund = foreign_card if foreign else desk.pick((order.paid_with, GIFT_CARD))
    call: ShopCall = ("return_items", {"order_id": order.order_id, "items": [item.item_id], "refund_to": refund})
    if late or foreign:
        call = ("escalate", {"order_id": order.order_id, "reason": "too late" if late else "other payment"})
    return Wish(
        opening="I want to return something.",
        order_id=order.order_id,
        hint=desk.hint(order),
        facts={"item": f"It is the {item.product}.", "refund": f"I want the money on my {refund} and nowhere else."},
        insists=refund,
        call=call,
        is_allowed=not late and not foreign,
    )


def _return(desk: _Counter) -> Wish:
    return _make_return(desk)


def _return_late(desk: _Counter) -> Wish:
    return _make_return(desk, late=True)


def _return_to_another_card(desk: _Counter) -> Wish:
    return _make_return(desk, foreign=True)


def _make_swap(desk: _Counter, status: str, tool: str, *, in_stock: bool) -> Wish | None:
    order = desk.order(status)
    item = desk.item(order)
    new = desk.other(item, in_stock=in_stock)
    if new is None:
        return None
    verb = "exchange something that I got" if status == "delivered" else "change what is in an order"
    call: ShopCall = (tool, {"order_id": order.order_id, "old_item": item.item_id, "new_item": new.item_id})
    if not in_stock:
        call = ("escalate", {"order_id": order.order_id, "reason": "out of stock"})
    return Wish(
        opening=f"I want to {verb}.",
        order_id=order.order_id,
        hint=desk.hint(order),
        facts={"item": f"It is the {item.product}.", "instead": f"I want it {new.option}, and nothing else will do."},
        insists=new.option,
        call=call,
        is_allowed=in_stock,
    )


def _exchange(desk: _Counter) -> Wish | None:
    return _make_swap(desk, "delivered", "exchange_item", in_stock=True)


def _exchange_for_nothing(desk: _Counter) -> Wish | None:
    return _make_swap(desk, "delivered", "exchange_item", in_stock=False)


def _change(desk: _Counter) -> Wish | None:
    return _make_swap(desk, "pending", "change_item", in_stock=True)


def _ask_total(desk: _Counter) -> Wish | None:
    order = desk.order("shipped")
    return Wish(
        opening="I want to know what an order cost in all.",
        order_id=order.order_id,
        hint=desk.hint(order),
        told=str(desk.shop.price(order.order_id)),
    )


Maker: TypeAlias = Callable[[_Counter], Wish | None]
_EASY: tuple[Maker, ...] = (_cancel, _return, _ask_total)
_ALL: tuple[Maker, ...] = (
    *(_cancel, _return, _exchange, _change, _ask_total),
    *(_cancel_shipped, _cancel_of_another, _return_late, _return_to_another_card, _exchange_for_nothing),
)

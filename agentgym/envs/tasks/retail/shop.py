"""The shop of Retail-v0: products, customers and orders, and the actions of its desk. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["GIFT_CARD", "Customer", "Order", "Shop", "ShopError", "Ticket", "Variant"]

GIFT_CARD = "gift card"


class ShopError(ValueError):
    """Raised for an action that the desk's system refuses, with a sentence for the caller."""


@dataclass(frozen=True)
class Variant:
    """A variant of a product: `Variant("4017", "lamp", "red", 30, True)`."""

    item_id: str
    product: str
    option: str
    price: int
    """The price in dollars."""
    in_stock: bool

    def __str__(self) -> str:
        stock = "in stock" if self.in_stock else "out of stock"
        return f"item {self.item_id}: {self.product}, {self.option}, {self.price} dollars, {stock}"


@dataclass(frozen=True)
class Customer:
    """A customer of the shop, who may ask for something."""

    user_id: str
    first_name: str
    last_name: str
    email: str
    zip_code: str
    cards: tuple[str, ...]
    """Payment methods, such as `visa-4821`; each customer has a gift card as well."""


@dataclass
class Order:
    """An order of a customer, and its state."""

    order_id: str
    user_id: str
    items: list[str]
    status: str
    """`pending`, `shipped`, `delivered`, or the state that the desk set."""
    paid_with: str
    days: int
    """The days since it was delivered; 0 if it was not."""
    notes: list[str] = field(default_factory=list)
    """The actions of the desk: returned, exchanged, refunded."""


@dataclass(frozen=True)
class Ticket:
    """A case that was handed to a manager."""

    order_id: str
    reason: str


@dataclass
class Shop:
    """Everything that is known and can be changed. Two shops are equal if the same was done to them."""

    variants: dict[str, Variant]
    customers: dict[str, Customer]
    orders: dict[str, Order]
    identified: set[str] = field(default_factory=set)
    """The ids of customers that were found by their details."""
    tickets: list[Ticket] = field(default_factory=list)

    # What can be looked up

    def find(self, **fields: str) -> str:
        """The customer of whom all of this is true."""
        criteria = {name: value.strip().casefold() for name, value in fields.items()}
        for customer in self.customers.values():
            if all(getattr(customer, name).casefold() == value for name, value in criteria.items()):
                self.identified.add(customer.user_id)
                return self.customer(customer.user_id)
        raise ShopError("no customer is known by that")

    def customer(self, user_id: str) -> str:
        """A customer and the numbers of the orders."""
        customer = self.customers[user_id]
        orders = ", ".join(order.order_id for order in self.orders.values() if order.user_id == user_id)
        return (
            f"{customer.user_id}: {customer.first_name} {customer.last_name}. "
            f"Cards: {', '.join(customer.cards)}. Orders: {orders}."
        )

    def order(self, order_id: str) -> str:
        """An order in full."""
        order = self._order(order_id)
        when = f" {order.days} days ago" if order.status == "delivered" else ""
        items = "; ".join(str(self.variants[item]) for item in order.items)
        notes = f" {'. '.join(order.notes)}." if order.notes else ""
        return (
            f"{order.order_id} of {order.user_id}: {order.status}{when}, paid with {order.paid_with}. {items}.{notes}"
        )

    def product(self, name: str) -> str:
        """All variants of a product."""
        variants = [str(variant) for variant in self.variants.values() if variant.product == name.strip().casefold()]
        if not variants:
            products = ", ".join(sorted({variant.product for variant in self.variants.values()}))
            raise ShopError(f"no product is called {name!r}; there are {products}")
        return "\n".join(variants)

    # What can be done

    def cancel(self, order_id: str, reason: str) -> str:
        """Cancels an order that has not been sent."""
        order = self._for_change(order_id, "pending")
        order.status = "cancelled"
        order.notes.append(f"cancelled: {reason}")
        return f"{order.order_id} is cancelled; {order.paid_with} gets {self._price(order.items)} dollars."

    def change(self, order_id: str, old_item: str, new_item: str) -> str:
        """Puts another variant into an order that has not been sent."""
        order = self._swap_item(order_id, "pending", old_item, new_item)
        order.notes.append(f"changed {old_item} to {new_item}")
        return f"{order.order_id} now has {self.variants[new_item]}."

    def exchange(self, order_id: str, old_item: str, new_item: str) -> str:
        """Takes a delivered item back for another variant."""
        order = self._swap_item(order_id, "delivered", old_item, new_item)
        order.notes.append(f"exchanged {old_item} for {new_item}")
        return f"{old_item} of {order.order_id} is exchanged for {self.variants[new_item]}."

    def take_back(self, order_id: str, items: Sequence[str], refund_to: str) -> str:
        """Takes delivered items back for money."""
        order, refund = self._order(order_id), refund_to.strip().casefold().removeprefix("the ").removeprefix("my ")
        if not items:
            raise ShopError("there are no items to return")
        for item in items:
            if items.count(item) > order.items.count(item):
                raise ShopError(f"item {item} is not in {order.order_id}")
        payments = (*self.customers[order.user_id].cards, GIFT_CARD)
        if refund not in payments:
            raise ShopError(f"a refund goes to one of {', '.join(payments)}")
        order = self._for_change(order_id, "delivered")
        for item in items:
            order.items.remove(item)
        order.notes.append(f"returned {', '.join(sorted(items))}: refund to {refund}")
        return f"{', '.join(items)} of {order.order_id} come back; {refund} gets {self._price(items)} dollars."

    def escalate(self, order_id: str, reason: str) -> str:
        """Hands a wish to a manager."""
        order = self._order(order_id)
        if not self.identified:
            order.notes.append("escalated for somebody who was not identified")
        self.tickets = sorted([*self.tickets, Ticket(order.order_id, reason)], key=str)
        return f"A manager will look at {order.order_id} ({reason})."

    def price(self, order_id: str) -> int:
        """The total price of all items of an order."""
        return self._price(self._order(order_id).items)

    def _price(self, items: Sequence[str]) -> int:
        return sum(self.variants[item].price for item in items)

    def _order(self, order_id: str) -> Order:
        order = self.orders.get(order_id.strip().lstrip("#").upper())
        if order is None:
            raise ShopError(f"there is no order {order_id!r}")
        return order

    def _for_change(self, order_id: str, status: str) -> Order:
        """An order of that status; it is marked from then on if its owner was not identified."""
        order = self._order(order_id)
        if order.status != status:
            raise ShopError(f"{order.order_id} is {order.status}; this is for orders that are {status}")
        if order.user_id not in self.identified:
            order.notes.append("changed for somebody who was not identified")
        return order

    def _swap_item(self, order_id: str, status: str, old_item: str, new_item: str) -> Order:
        if old_item not in self._order(order_id).items:
            raise ShopError(f"item {old_item} is not in order {order_id}")
        if new_item not in self.variants:
            raise ShopError(f"there is no item {new_item!r}")
        order = self._for_change(order_id, status)
        order.items[order.items.index(old_item)] = new_item
        return order

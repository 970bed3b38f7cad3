"""Draws a shop: its products, its customers and their orders."""

from __future__ import annotations

import numpy as np

from agentgym.envs.tasks.retail.shop import Customer, Order, Shop, Variant

__all__ = ["NUM_CUSTOMERS", "draw_shop"]

PRODUCTS = {
    "lamp": ("red", "blue", "white", "black"),
    "kettle": ("one liter", "two liters", "glass", "steel"),
    "backpack": ("small", "medium", "large", "with wheels"),
    "headphones": ("wired", "wireless", "in-ear", "studio"),
    "jacket": ("size s", "size m", "size l", "size xl"),
    "puzzle": ("300 pieces", "500 pieces", "1000 pieces", "2000 pieces"),
}
FIRST = ("Mia", "Noah", "Yara", "Liam", "Aiko", "Omar", "Ines", "Ravi", "Zoe", "Ivan", "Lena", "Tariq")
LAST = ("Silva", "Khan", "Rossi", "Novak", "Moore", "Tanaka", "Garcia", "Lopez", "Kim", "Meyer", "Patel", "Santos")
NUM_CUSTOMERS = 5
ORDERS_EACH = 4
STATES = ("pending", "shipped", "delivered", "delivered")
"""Each customer has orders of all kinds: one on its way out, one under way, one delivered lately, one long ago."""
WINDOW_DAYS = 30


def draw_shop(draw: np.random.Generator) -> Shop:
    """A shop with six products, five customers and twenty orders."""
    variants: dict[str, Variant] = {}
    item_ids = iter(draw.choice(np.arange(1000, 10000), 64, replace=False).tolist())
    for product, options in PRODUCTS.items():
        stock = draw.permutation([True, True, True, False])
        for option, in_stock in zip(options, stock, strict=True):
            item_id = str(next(item_ids))
            variants[item_id] = Variant(item_id, product, option, int(draw.integers(10, 200)), bool(in_stock))
    firsts, lasts = draw.permutation(FIRST), draw.permutation(LAST)
    customers = {}
    for index in range(NUM_CUSTOMERS):
        first, last = str(firsts[index]), str(lasts[index])
        user_id = f"{first}_{last}_{draw.integers(1000, 10000)}".lower()
        email = f"{first}.{last}{draw.integers(10, 100)}@mail.example".lower()
        cards = tuple(f"{kind}-{draw.integers(1000, 10000)}" for kind in ("visa", "mastercard"))
        customers[user_id] = Customer(user_id, first, last, email, str(draw.integers(10000, 100000)), cards)
    numbers = iter(draw.choice(np.arange(10000, 100000), NUM_CUSTOMERS * ORDERS_EACH, replace=False).tolist())
    orders = {}
    for customer in customers.values():
        for number, status in enumerate(STATES):
            order_id = f"W{next(numbers)}"
            lately = int(draw.integers(1, WINDOW_DAYS + 1))
            days = 0 if status != "delivered" else lately if number == 2 else int(draw.integers(WINDOW_DAYS + 1, 90))
            items = _items(draw, variants)
            orders[order_id] = Order(
                order_id, customer.user_id, items, status, customer.cards[int(draw.integers(2))], days
            )
    return Shop(variants, customers, orders)


def _items(draw: np.random.Generator, variants: dict[str, Variant]) -> list[str]:
    """One to three items, of different products."""
    products = draw.permutation(list(PRODUCTS))[: int(draw.integers(1, 4))]
    chosen = []
    for product in products:
        of_it = [variant.item_id for variant in variants.values() if variant.product == product]
        chosen.append(of_it[int(draw.integers(len(of_it)))])
    return chosen

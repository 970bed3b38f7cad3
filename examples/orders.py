"""A shop's desk: it finds the order that a customer writes about, and refunds what was paid.

agentgym play examples/orders.py:Orders
agentgym env check examples/orders.py:Orders
agentgym sft --env examples/orders.py:Orders --output runs/orders-sft
agentgym train --env examples/orders.py:Orders --model runs/orders-sft
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from agentgym.envs import Policy, Script, ScriptedPolicy, ToolEnv
from agentgym.tools import tool

NAMES = "Adler Bauer Costa Duval Ekman Fiala Gruber Hansen Ivanov Jansen Kovac Lopes Moreau Novak Olsen Petrov".split()
ITEMS = "lamp desk chair shelf clock mirror carpet kettle".split()


class Orders(ToolEnv):
    """One customer of six wants the price of one of two items back."""

    system_prompt = "Look the customer's orders up. Then refund the one that is asked for, exactly as it was paid."
    max_turns = 4
    runs_inline = True

    def start(self, options: dict[str, Any]) -> str:
        """Makes a database of twelve orders, and the letter of a customer."""
        random = self.np_random
        names = random.choice(len(NAMES) ** 2, size=6, replace=False)
        customers = [f"{NAMES[name // len(NAMES)]}-{NAMES[name % len(NAMES)]}" for name in names]
        bought = [(customer, str(item)) for customer in customers for item in random.permutation(ITEMS)[:2]]
        numbers = random.choice(90_000, size=len(bought), replace=False) + 10_000
        self.rows = [
            (int(number), customer, item, int(random.integers(5, 5_000)))
            for number, (customer, item) in zip(numbers, bought, strict=True)
        ]
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("create table orders (number integer primary key, customer, item, paid)")
        self.database.executemany("insert into orders values (?, ?, ?, ?)", self.rows)
        self.wanted = self.rows[int(random.integers(12))]
        return f"{self.wanted[1]} writes: I want my money back for the {self.wanted[2]}."

    def task_identity(self) -> list[tuple[int, str, str, int]]:
        """Returns the rows: no two tasks have equal ones."""
        return [self.wanted, *self.rows]

    @tool
    def find_orders(self, customer: str) -> str:
        """Lists the orders of a customer."""
        query = "select number, item, paid from orders where customer = ?"
        rows = self.database.execute(query, (customer,)).fetchall()
        return "\n".join(json.dumps({"order": row[0], "item": row[1], "paid": row[2]}) for row in rows) or "none"

    @tool
    def refund(self, order: int, amount: int) -> str:
        """Pays an amount back for an order, which ends the episode."""
        is_right = (order, amount) == (self.wanted[0], self.wanted[3])
        self.end(success=is_right, reward=float(is_right))
        return "Paid." if is_right else "Refused."

    def make_oracle(self) -> Policy:
        return ScriptedPolicy(self.solve)

    def solve(self, observation: str) -> Script:
        """Looks the customer up, and refunds the order of the item that the letter names."""
        lines = yield "find_orders", {"customer": self.wanted[1]}
        orders = [json.loads(line) for line in lines.splitlines()]
        order = next(order for order in orders if order["item"] == self.wanted[2])
        yield "refund", {"order": order["order"], "amount": order["paid"]}

"""How much a search may do, counted so that the same question is always cut at the same place."""


class OutOfWorkError(Exception):
    """The budget is used up: what was found until then is the answer."""


class Work:
    """Counts what is solved and simulated, up to `budget`; None is without end.

    A minimum over layouts, a linear program, a node of an integer program and a simulated step
    count one each.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget, self.spent = budget, 0

    @property
    def left(self) -> int | None:
        """What may still be done."""
        return None if self.budget is None else max(0, self.budget - self.spent)

    def spend(self, amount: int = 1) -> None:
        """Count `amount`; raises `OutOfWorkError` where it is more than is left."""
        self.spent += amount
        if self.budget is not None and self.spent > self.budget:
            raise OutOfWorkError

"""Prices add up; operators cost what the formulas in their sources say."""

from hypothesis import given
from hypothesis import strategies as st

from parloom.cost.price import Price, total

prices = st.builds(
    Price,
    st.integers(0, 100).map(float),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 99).map(float), st.integers(0, 9)), max_size=4
    ).map(tuple),
)


@given(prices, prices, prices)
def test_addition_is_associative_with_a_zero(a: Price, b: Price, c: Price) -> None:
    assert (a + b) + c == a + (b + c) == total([a, b, c])
    assert a + Price() == a == total([a])
    assert a.times(2) == a + a

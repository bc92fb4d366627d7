"""What is worth simulating."""

from parloom.search.trust import SEEN, Trust


def test_everything_is_worth_it_until_something_fits() -> None:
    trust = Trust()
    trust.saw(100, 100, fits=False)
    assert trust.promises(1e9)


def test_an_estimate_may_be_too_high_by_a_margin_at_first() -> None:
    trust = Trust()
    trust.saw(1000, 1000, fits=True)
    assert trust.promises(1080)
    assert not trust.promises(1100)


def test_estimates_that_were_much_too_high_are_believed_to_be() -> None:
    """After few simulations, and after many."""
    trust = Trust()
    for _ in range(SEEN + 1):
        trust.saw(1000, 800, fits=True)
        assert trust.promises(1000)
        assert trust.promises(1010)
        assert not trust.promises(1020)


def test_estimates_that_were_right_are_taken_at_their_word() -> None:
    trust = Trust()
    for _ in range(SEEN):
        trust.saw(1000, 1000, fits=True)
    assert trust.promises(1005)
    assert not trust.promises(1080)


def test_one_that_was_too_high_gives_others_their_chance() -> None:
    trust = Trust()
    for _ in range(SEEN):
        trust.saw(1000, 1000, fits=True)
    trust.saw(1100, 1050, fits=False)
    assert trust.promises(1050)

"""What is blamed for trouble, and what follows from it."""

from __future__ import annotations

from moetta.guard.config import GuardConfig
from moetta.guard.recovery import Recovery


def learning(images: int, **fields: object) -> Recovery:
    """A recovery after so many images of untroubled learning."""
    found = Recovery(GuardConfig.preset(cooldown=100, backoff=4, **fields))
    found.pass_time(images)
    return found


def after_wait(recovery: Recovery) -> Recovery:
    """The same, once learning has resumed."""
    while recovery.mode != "adapt":
        recovery.pass_time(10)
    return recovery


def test_trouble_soon_after_the_start_is_blamed_on_the_rate():
    recovery = learning(199)
    assert recovery.trouble(has_good_state=False) == "reset"
    assert (recovery.mode, recovery.wait, recovery.rate) == ("source", 100, 0.25)
    assert after_wait(recovery).wait == 6400  # until the rate is raised again
    assert recovery.trouble(has_good_state=True) == "reset"
    assert (recovery.wait, recovery.rate) == (400, 1 / 16)


def test_trouble_after_long_learning_is_not():
    recovery = learning(200)
    assert recovery.trouble(has_good_state=True) == "rollback"
    assert (recovery.mode, recovery.wait, recovery.rate) == ("hold", 100, 1.0)
    assert after_wait(recovery).wait == 0  # there is no rate to raise
    recovery.pass_time(400)
    assert recovery.trouble(has_good_state=True) == "rollback"
    assert recovery.rate == 1.0


def test_each_trouble_makes_the_next_sooner_than_it_should_be():
    recovery = learning(200)
    for bound in (400, 800, 1600):
        recovery.trouble(has_good_state=True)
        after_wait(recovery).pass_time(bound)
    assert recovery.trouble(has_good_state=True) == "rollback"
    after_wait(recovery).pass_time(3199)
    assert recovery.trouble(has_good_state=True) == "reset"
    after_wait(recovery).pass_time(6399)
    assert recovery.trouble(has_good_state=True) == "rollback"
    assert recovery.rate == 0.25  # soon, from the source model
    after_wait(recovery).pass_time(6400)  # a long calm
    assert recovery.troubles == 0


def test_a_good_state_that_leads_to_trouble_soon_is_given_up_before_the_rate_is_lowered():
    recovery = learning(500)
    recovery.trouble(has_good_state=True)
    assert after_wait(recovery).trouble(has_good_state=True) == "reset"
    assert (recovery.mode, recovery.rate) == ("source", 1.0)
    assert after_wait(recovery).trouble(has_good_state=False) == "reset"
    assert recovery.rate == 0.25


def test_a_good_state_in_trouble_while_held_says_nothing_about_the_rate():
    recovery = learning(50)
    recovery.trouble(has_good_state=True)
    assert (recovery.mode, recovery.rate) == ("hold", 0.25)
    recovery.pass_time(60)
    assert recovery.trouble(has_good_state=True) == "reset"
    assert (recovery.mode, recovery.rate, recovery.wait) == ("source", 0.25, 40)  # the wait goes on


def test_learning_resumes_and_the_rate_is_raised_in_time():
    recovery = learning(0)
    recovery.trouble(has_good_state=False)
    assert recovery.pass_time(99) is None
    assert recovery.pass_time(1) == "resume"
    assert recovery.pass_time(6399) is None
    assert recovery.pass_time(1) == "calm"
    assert (recovery.rate, recovery.wait) == (1.0, 0)
    assert recovery.pass_time(1_000_000) is None

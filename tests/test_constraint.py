"""The controller against the traps: wind-up, cliffs, noise, flattering training losses."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselens.constraint import Constraint


def make(**options) -> Constraint:
    return Constraint(target=3.0, tolerance=0.01, **options)


def test_lambda_rises_on_harm_and_falls_on_slack():
    harmed, slack = make(), make()
    for _ in range(20):
        harmed.step(3.5)
        slack.step(2.5)
    assert harmed.log_lambda > 0 > slack.log_lambda


def test_harm_is_answered_faster_than_slack_is_used():
    harmed, slack = make(), make()
    for _ in range(10):
        harmed.step(3.5)
        slack.step(2.5)
    assert harmed.log_lambda >= 2.5 * -slack.log_lambda


def test_no_wind_up():
    """A thousand hopeless steps are forgotten within a hundred good ones."""
    c = make()
    for _ in range(1000):
        c.step(9.0)
    steps = 0
    while c.log_lambda >= 0:
        c.step(2.0)
        steps += 1
    assert steps < 200


def test_a_cliff_is_answered_within_a_hundred_steps():
    """Lambda is at its lowest when the loss jumps: the loss must soon have most of the objective again."""
    c = make()
    for _ in range(1000):
        c.step(2.9)
    assert c.weight < 0.01
    for _ in range(100):
        c.step(3.5)
    assert c.weight > 0.5


def test_noise_larger_than_the_tolerance_does_not_throw_lambda_about():
    """Alternating losses around the target: lambda stays where it is."""
    c = make()
    for step in range(2000):
        c.step(3.0 + (0.2 if step % 2 else -0.2))
    assert abs(c.log_lambda) < 2.1


def test_slack_loosens_the_target():
    tight, loose = make(), make()
    for _ in range(50):
        tight.step(3.2)
        loose.step(3.2, slack=0.5)
    assert loose.log_lambda < 0 < tight.log_lambda


def test_evaluation_corrects_a_flattering_training_loss():
    """Training says 2.99, held-out text says 3.1: the constraint must push although training looks fine."""
    c = make()
    for _ in range(200):
        c.step(2.99)
        c.correct(3.1)
    assert c.log_lambda > 0


def test_weight_is_lambda_over_one_plus_lambda():
    c = make(log_lambda=math.log(3.0))
    assert c.weight == pytest.approx(0.75)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=100), st.floats(0, 1))
def test_state_stays_finite_and_bounded(losses, slack):
    c = make()
    for loss in losses:
        c.step(loss, slack)
        c.correct(loss)
        assert c.lowest <= c.log_lambda <= c.highest
        assert 0 < c.weight < 1
    assert Constraint(**c.state()) == c, "a checkpoint brings back all of it"

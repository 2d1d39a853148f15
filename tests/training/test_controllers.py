"""The controllers against the traps: wind-up, cliffs, noise, flattering training losses, swings of a budget."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sparselens.training.controllers import Budget, Constraint


class Controller(Constraint):
    """With the density and the share of steps done, which this one does not need, left out."""

    def step(self, loss, density=0.5, done=1.0):
        super().step(loss, density, done)


def make(**options) -> Controller:
    return Controller(target=3.0, tolerance=0.01, **options)


def test_lambda_rises_on_harm_and_falls_on_slack():
    harmed, slack = make(), make()
    for _ in range(20):
        harmed.step(3.5)
        slack.step(2.5)
    assert harmed.log_lambda > 0 > slack.log_lambda


def test_no_excess_is_allowed_unless_asked_for():
    strict = make()
    strict.step(3.0, done=0.0)
    assert strict.log_lambda == 0, "neither harm nor slack: the first step is held to the very target"


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
    """Slack of 1 until 0.6: half of it is left at 0.3, none at 0.6."""
    half, none = make(slack=1.0), make(slack=1.0)
    for _ in range(50):
        half.step(3.2, done=0.3)
        none.step(3.2, done=0.6)
    assert half.log_lambda < 0 < none.log_lambda


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


def test_three_steps_of_the_constraint_by_hand():
    """With every default: slack until 0.6, rate 0.03, urgency 3, memory 0.95."""
    c = Constraint(target=3.0, tolerance=1.0, slack=1.0)
    c.step(4.0, 0.5, 0.3)  # slack 0.5; 0.5 above in units of 1 + 0.25 * 0.5
    assert (c.average, c.noise) == (4.0, 0.0) and c.log_lambda == pytest.approx(0.03 * 3 * 0.5 / 1.125)
    before = c.log_lambda
    c.step(3.6, 0.5, 0.3)  # noise 0.05 * 0.4, mean 0.95 * 4 + 0.05 * 3.6
    assert (c.average, c.noise) == (pytest.approx(3.98), pytest.approx(0.02))
    assert c.log_lambda - before == pytest.approx(0.03 * 3 * 0.48 / (1 + 0.2 * 0.02 + 0.125))
    c.correct(3.4)
    assert c.correction == pytest.approx(-0.29)
    c.correct(3.4)
    assert c.correction == pytest.approx(-0.435)
    before = c.log_lambda
    c.step(2.98, 0.5, 0.7)  # no slack left; noise 0.019 + 0.05, mean 3.93: the correction leaves 3.495, 0.495 above
    assert c.log_lambda - before == pytest.approx(0.03 * 3 * 0.495 / (1 + 0.2 * 0.069))
    before, c.average = c.log_lambda, 2.0
    c.step(2.0, 0.5, 0.7)  # 1.435 below 3.435: full speed down, not urgent
    assert c.log_lambda - before == pytest.approx(-0.03)
    c.average, c.tolerance, c.noise = 2.98 + 0.435, 1.0, 0.0
    before = c.log_lambda
    c.step(2.98 + 0.435, 0.5, 0.7)  # 0.02 below: slowly down
    assert c.log_lambda - before == pytest.approx(-0.03 * 0.02)
    for loss, bound in ((9.0, 2.0), (0.0, -8.0)):
        for _ in range(2000):
            c.step(loss, 0.5, 1.0)
        assert c.log_lambda == bound and c.loss_weight == pytest.approx(math.exp(bound))
    c.log_lambda = math.log(3)
    assert c.objective(torch.tensor(8.0), torch.tensor(0.4)).item() == pytest.approx(0.75 * 8 + 0.25 * 0.4)
    assert c.met(2.5, 0.5, 1.0) and not c.met(2.6, 0.5, 0.0) and c.sampled(1.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=100), st.floats(0, 1))
def test_state_stays_finite_and_bounded(losses, slack):
    c = make(slack=slack)
    for loss in losses:
        c.step(loss, done=0.1)
        c.correct(loss)
        assert c.lowest <= c.log_lambda <= c.highest
        assert 0 < c.weight < 1
    assert Controller(**asdict(c)) == c, "a checkpoint brings back all of it"


def test_constraint_ranks_meeting_over_density_and_loss_over_nothing():
    rank = make().rank
    assert rank(4.0, 0.0, 0.9) < rank(5.0, 0.0, 0.5), "neither meets it: closer to the target"
    assert rank(2.9, 0.0, 0.9) < rank(4.0, 0.0, 0.1), "meets it"
    assert rank(2.9, 0.0, 0.4) < rank(2.5, 0.0, 0.5), "both meet it: sparser"
    assert rank(2.9, 0.0, 0.4) < rank(3.0, 0.02, 0.1), "sparser, but not surely within the target"
    assert rank(2.5, 0.5, 0.4) == [0.0, 0.4] and rank(2.6, 0.5, 0.4) == [1.0, 2.6], "as checkpoints have them"


# ---- the budget ------------------------------------------------------------------------------------------------------


def budget(**options) -> Budget:
    return Budget(target=3.0, most=0.01, **options)


def test_budget_falls_geometrically_from_where_the_density_started():
    b = budget(closing=0.5, margin=0.0)
    b.step(3.0, 0.64, 0.0)
    assert b.allowed(0.0) == pytest.approx(0.64)
    assert b.allowed(0.25) == pytest.approx(0.08), "the geometric mean, half-way"
    assert b.allowed(0.5) == b.allowed(1.0) == pytest.approx(0.01)


def test_gates_are_sampled_while_they_close():
    assert budget(closing=0.5).sampled(0.49) and not budget(closing=0.5).sampled(0.5)


def test_pressure_rises_above_the_budget_and_falls_below():
    above, below = budget(start=0.5), budget(start=0.5)
    for _ in range(20):
        above.step(3.0, 0.02, 1.0)
        below.step(3.0, 0.005, 1.0)
    assert above.log_pressure > -4 > below.log_pressure
    assert above.loss_weight < below.loss_weight


def test_density_counts_in_units_of_the_budget():
    """One per cent of the budget weighs the same at a budget of 64 % and of 1 %: the pressure does not fade."""
    for done, unit in ((0.0, 0.64), (1.0, 0.01)):
        b = budget(margin=0.0)
        b.step(3.0, 0.64, 0.0)
        b.step(3.0, unit, done)
        b.log_pressure = math.log(0.1)
        density = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        b.objective(torch.tensor(2.0, dtype=torch.float64), density).backward()
        assert density.grad is not None and density.grad.item() * unit == pytest.approx(0.1)


def test_budget_holds_a_model_that_answers_slowly():
    """A toy: log density moves towards log(loss price / pressure) with a lag of 50 steps. No swings, no offset."""
    b, steps, log_density, seen = budget(), 3000, math.log(0.6), []
    for step in range(steps):
        b.step(3.0, math.exp(log_density), step / steps)
        log_density += (math.log(0.001) - b.log_pressure - log_density) / 50
        seen.append(math.exp(log_density))
    late = seen[len(seen) // 2 :]
    assert max(late) < 0.0105 and min(late) > 0.0085
    assert max(seen[100:]) < 0.7


def test_pressure_is_relieved_once_when_the_budget_stands_and_follows_faster_from_then_on():
    b = budget(closing=0.5, margin=0.0)
    b.step(3.0, 0.5, 0.0)

    def change(done: float) -> float:
        before = b.integral
        b.step(3.0, b.allowed(done) * math.exp(0.1), done)
        return b.integral - before

    falling = [change(0.499) for _ in range(100)][-1]
    assert falling == pytest.approx(0.1 * b.rate, rel=0.01)
    assert change(0.5) < -0.9 * b.relief
    standing = [change(0.5) for _ in range(100)][-1]
    assert standing == pytest.approx(0.1 * b.rate * b.faster, rel=0.01), "once, not at every step"


def test_pressure_is_not_relieved_while_gates_lag_far_behind():
    """Still at five times the budget when it stops falling: the pressure is what will get there."""
    b = budget(closing=0.5, margin=0.0)
    b.step(3.0, 0.5, 0.0)
    for _ in range(20):
        before = b.integral
        b.step(3.0, 5 * b.allowed(0.5), 0.5)
        assert b.integral >= before and not b.stands
    for _ in range(20):
        b.step(3.0, 2 * b.allowed(0.5), 0.5)
    assert b.stands and b.integral < before


def test_budget_does_not_wind_up():
    """A thousand steps far above the budget are forgotten within two hundred below it."""
    b = budget(start=0.5)
    for _ in range(1000):
        b.step(3.0, 0.5, 1.0)
    assert b.log_pressure == b.highest
    for _ in range(200):
        b.step(3.0, 0.001, 1.0)
    assert b.log_pressure < -3


def test_budget_ranks_within_over_outside_and_then_by_loss():
    rank = budget().rank
    assert rank(9.0, 0.0, 0.01) < rank(1.0, 0.0, 0.011), "within the budget"
    assert rank(3.1, 0.0, 0.01) < rank(3.2, 0.0, 0.001), "both within: lower loss"
    assert rank(9.0, 0.0, 0.02) < rank(1.0, 0.0, 0.03), "both outside: closer to the budget"
    assert budget().met(2.9, 0.05, 0.01) and not budget().met(2.99, 0.05, 0.01) and not budget().met(2.0, 0.0, 0.02)


def test_steps_of_the_budget_by_hand():
    """With every default: closing 0.2, margin 0.03, memory 0.8, rate 0.02 and 3 times that, relief 1.5, gain 1."""
    b = budget()
    assert b.allowed(0.0) == 1.0, "before the first step"
    b.step(3.0, 0.5, 0.0)
    assert (b.start, b.open, b.average, b.unit, b.integral, b.log_pressure) == (0.5, 0.5, 3.0, 0.5, -4.0, -4.0)
    b.step(4.0, 0.4, 0.02)
    assert b.open == pytest.approx(0.48) and b.average == pytest.approx(3.05)
    assert b.unit == pytest.approx(0.5 * (0.0097 / 0.5) ** 0.1)
    error = math.log(0.48 / b.unit)
    assert 0.3 < error < 0.4 and b.integral == pytest.approx(-4 + 0.02 * error)
    assert b.log_pressure == pytest.approx(b.integral + error)
    assert b.sampled(0.19) and not b.sampled(0.2) and not b.stands
    b.open = 0.01
    before = b.integral
    b.step(3.0, 0.01, 0.2)
    error = math.log(0.01 / 0.0097)
    assert b.stands and b.integral == pytest.approx(before - 1.5 + 3 * 0.02 * error)
    assert b.objective(torch.tensor(2.0), torch.tensor(0.3)).item() == pytest.approx(
        2 + math.exp(b.log_pressure) / 0.0097 * 0.3
    )
    assert b.loss_weight == pytest.approx(math.exp(-b.log_pressure))
    b.integral, b.open = -2.0, 1e-4
    b.step(3.0, 0.0, 1.0)  # far below: full speed down, and at once by the gain
    assert b.integral == pytest.approx(-2.06) and b.log_pressure == pytest.approx(-3.06)
    for density, bound in ((0.5, 1.0), (0.0, -9.0)):
        for _ in range(400):
            b.step(3.0, density, 1.0)
        assert b.log_pressure == b.integral == bound
    assert b.met(2.5, 0.5, 0.01) and b.rank(2.0, 0.1, 0.01) == [0.0, 2.0] and b.rank(2.0, 0.1, 0.02) == [1.0, 0.02]
    sparse = Budget(target=3.0, most=0.5)
    sparse.step(3.0, 0.1, 0.0)
    assert sparse.allowed(0.0) == sparse.allowed(0.1) == 0.5 * 0.97, "sparser than the budget from the start"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=100))
def test_budget_state_stays_finite_and_bounded(steps):
    b = budget()
    for loss, density, done in steps:
        b.step(loss, density, done)
        assert b.lowest <= b.log_pressure <= b.highest and math.isfinite(b.loss_weight)
    assert Budget(**asdict(b)) == b, "a checkpoint brings back all of it"

"""Two controllers that trade loss against density while a model trains. One of them steers a run.

Budget, the default: as little loss as possible with at most this share of the edges open.

    minimise  loss   subject to   density <= budget(t)
    L = loss + pressure * density / budget(t)
    log(pressure) = I + gain * error,   I <- I + rate * error,   error = clip(log(density / budget(t)))

(`per_query` counts open edges per head and query in place of density: what it says of a text of 16 tokens and of one
of 512 is the same.)

1. While the gates close, budget(t) falls geometrically from the density at the first step to the final one, and gates
   are sampled: the noise is what makes them choose a side.
2. From `closing` on, budget(t) stays, gates are deterministic (what trains is what will be evaluated), and the weights
   have the rest of the run to learn to do without the closed edges. Holding a density takes far less pressure than
   lowering it: the pressure falls at once by `relief` (as soon as less than e times the budget is open), and follows
   faster from then on.
Density counts in units of the budget, so the pressure (nats per e-fold) does not fade as both fall, and no target of
loss can make the gates open again.

Constraint: as few edges as possible at this loss. For models that can meet it: small tasks, generous tolerances.

    minimise  density   subject to   loss <= target
    L = (density + lambda * (loss - target)) / (1 + lambda)
    lambda <- lambda * exp(rate * clip((EMA(loss) - target) / scale))

What makes the plain rule fail in practice, and the line here against it (docs/LOG.md, "Traps of a target of loss"):
- lambda winds up while the loss is out of reach and takes for ever to come down: hard bounds in log space.
- one more closed edge ruins the loss within a few steps (a cliff): harm counts `urgency` times as much as slack.
- batch noise larger than the tolerance throws lambda about: the excess is measured in units of tolerance, noise and
  slack together.
- a tight target from the first step freezes everything: `slack` nats are allowed on top, falling to zero.
- the training loss flatters (sampled gates, seen text): `correct` moves the target by what evaluation measured.
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Budget:
    """Least loss within a density. All of its state goes into a checkpoint."""

    target: float  # held-out loss that would be good enough: only reported, the budget does not depend on it
    most: float  # how much may be open in the end: a share of the allowed pairs or edges per head and query
    per_query: bool = False  # which of the two, here and wherever it says `density`
    closing: float = 0.2  # share of the steps in which the budget falls to that
    rate: float = 0.02  # change of log(pressure) per step at full error
    faster: float = 3.0  # times that rate once the budget stands
    relief: float = 1.5  # taken off log(pressure) when it does
    gain: float = 1.0  # answer of log(pressure) to the error at once: damps the swings of the slow part
    margin: float = 0.03  # aim this share below the budget
    lowest: float = -9.0  # bounds of log(pressure)
    highest: float = 1.0
    memory: float = 0.8  # of the running mean of the density
    log_pressure: float = -4.0
    integral: float = -4.0
    start: float | None = None  # density at the first step
    open: float | None = None  # running mean of the density
    unit: float = 1.0  # the budget of the last step
    stands: bool = False  # whether the budget has stopped falling, and the density is near it
    average: float | None = None  # running mean of the training loss

    def sampled(self, done: float) -> bool:
        """Whether gates are drawn at random at this share of the steps."""
        return done < self.closing

    def allowed(self, done: float) -> float:
        """The budget when this share of the steps is done."""
        final = self.most * (1 - self.margin)
        start = max(self.start or 1.0, final)
        return start * float((final / start) ** min(1.0, done / self.closing))

    def objective(self, loss: Tensor, density: Tensor) -> Tensor:
        return loss + math.exp(self.log_pressure) / self.unit * density

    def step(self, loss: float, density: float, done: float) -> None:
        """Take in one step's training loss and density."""
        density = max(density, 1e-9)
        self.start = self.start or density
        self.open = density if self.open is None else self.memory * self.open + (1 - self.memory) * density
        self.average = loss if self.average is None else 0.95 * self.average + 0.05 * loss
        self.unit = self.allowed(done)
        error = max(-1.0, min(1.0, math.log(self.open / self.unit)))
        if done >= self.closing and error < 1 and not self.stands:
            self.stands = True
            self.integral -= self.relief
        rate = self.rate * (self.faster if self.stands else 1.0)
        self.integral = max(self.lowest, min(self.highest, self.integral + rate * error))
        self.log_pressure = max(self.lowest, min(self.highest, self.integral + self.gain * error))

    def correct(self, evaluated: float) -> None:
        """Nothing to correct: once the budget stands, training and evaluation use the same gates."""

    def met(self, loss: float, margin: float, density: float) -> bool:
        return density <= self.most and loss + margin <= self.target

    def rank(self, loss: float, margin: float, density: float) -> list[float]:
        """Smaller is better: within the budget before outside; inside by loss, outside by density."""
        return [0.0, loss] if density <= self.most else [1.0, density]

    @property
    def loss_weight(self) -> float:
        """Weight of the loss where the density has weight one."""
        return math.exp(-self.log_pressure)


@dataclass
class Constraint:
    """Least density within a loss. All of its state goes into a checkpoint."""

    target: float  # what the deterministic, held-out loss must not exceed
    tolerance: float  # an excess of this many nats is a serious one
    slack: float = 0.0  # extra nats at the first step
    slack_until: float = 0.6  # share of the steps at which they are gone
    rate: float = 0.03  # change of log(lambda) per step at full speed
    urgency: float = 3.0  # harm is answered this many times faster than slack is used
    lowest: float = -8.0  # bounds of log(lambda)
    highest: float = 2.0
    memory: float = 0.95  # of the running means
    log_lambda: float = 0.0
    average: float | None = None  # running mean of the training loss
    noise: float = 0.0  # running mean of its distance from that mean
    correction: float = 0.0  # evaluated minus training loss

    def sampled(self, done: float) -> bool:
        return True

    @property
    def weight(self) -> float:
        """lambda / (1 + lambda): the share of the loss in the objective; the density has the rest."""
        return 1 / (1 + math.exp(-self.log_lambda))

    def objective(self, loss: Tensor, density: Tensor) -> Tensor:
        return (1 - self.weight) * density + self.weight * loss

    def step(self, loss: float, density: float, done: float) -> None:
        """Take in one step's training loss."""
        slack = self.slack * max(0.0, 1 - done / self.slack_until)
        if self.average is None:
            self.average = loss
        self.noise = self.memory * self.noise + (1 - self.memory) * abs(loss - self.average)
        self.average = self.memory * self.average + (1 - self.memory) * loss
        # The mean of ~1/(1 - memory) steps still carries about a fifth of one step's noise.
        scale = self.tolerance + 0.2 * self.noise + 0.25 * slack
        excess = (self.average - (self.target + slack - self.correction)) / scale
        push = max(-1.0, min(self.urgency, excess * (self.urgency if excess > 0 else 1.0)))
        self.log_lambda = max(self.lowest, min(self.highest, self.log_lambda + self.rate * push))

    def correct(self, evaluated: float) -> None:
        """Take in a deterministic, held-out loss, so that the constraint is aimed at what will be reported."""
        if self.average is not None:
            self.correction += 0.5 * (evaluated - self.average - self.correction)

    def met(self, loss: float, margin: float, density: float) -> bool:
        return loss + margin <= self.target

    def rank(self, loss: float, margin: float, density: float) -> list[float]:
        """Smaller is better: within the target before outside; inside by density, outside by loss."""
        return [0.0, density] if self.met(loss, margin, density) else [1.0, loss]

    @property
    def loss_weight(self) -> float:
        return math.exp(self.log_lambda)

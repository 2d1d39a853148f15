"""The controller that holds the loss at its target while the gates close.

    minimise  density   subject to   loss <= target
    L = (density + lambda * (loss - target)) / (1 + lambda)
    lambda <- lambda * exp(rate * clip((EMA(loss) - target) / scale))

What makes the plain rule fail in practice, and the line here against it (docs/sparsify.md tells the story):
- lambda winds up while the loss is out of reach and takes for ever to come down: hard bounds in log space.
- one more closed edge ruins the loss within a few steps (a cliff): harm counts `urgency` times as much as slack.
- batch noise larger than the tolerance throws lambda about: the excess is measured in units of tolerance, noise and
  slack together.
- the training loss flatters (sampled gates, seen text): `correct` moves the target by what evaluation measured.
"""

import math
from dataclasses import asdict, dataclass


@dataclass
class Constraint:
    """State of the controller. All of it goes into a checkpoint."""

    target: float  # what the deterministic, held-out loss must not exceed
    tolerance: float  # an excess of this many nats is a serious one
    rate: float = 0.03  # change of log(lambda) per step at full speed
    urgency: float = 3.0  # harm is answered this many times faster than slack is used
    lowest: float = -8.0  # bounds of log(lambda)
    highest: float = 2.0
    memory: float = 0.95  # of the running means
    log_lambda: float = 0.0
    average: float | None = None  # running mean of the training loss
    noise: float = 0.0  # running mean of its distance from that mean
    correction: float = 0.0  # evaluated minus training loss

    @property
    def weight(self) -> float:
        """lambda / (1 + lambda): the share of the loss in the objective; the density has the rest."""
        return 1 / (1 + math.exp(-self.log_lambda))

    def step(self, loss: float, slack: float = 0.0) -> None:
        """Take in one step's training loss; `slack` loosens the target for now."""
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

    def state(self) -> dict[str, float | None]:
        return asdict(self)

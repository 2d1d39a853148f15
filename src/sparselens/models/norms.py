"""Norms with denominators that can be held: LayerNorm and RMS norm become linear maps with a transpose."""

from torch import Tensor, nn

from .architectures import norm_parts


class Norm:
    """x -> gain * c(x) / d(x) + bias, with denominators d that can be held. c subtracts the mean (LayerNorm) or not."""

    def __init__(self, module: nn.Module, like: Tensor):
        self.gain, self.bias, self.centred, self.epsilon = norm_parts(module, like)
        self.scale = like.new_zeros(0)  # [T, 1]: 1 / d, once held

    def __call__(self, x: Tensor) -> Tensor:
        """The norm itself, in the dtype of x (Hugging Face's RMS norms round to fp32), keeping its denominators."""
        c = self._centre(x)
        self.scale = (c.pow(2).mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return self.gain * c * self.scale + self.bias

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def push(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        """The linear part, denominators held. x [..., T, D], or [n, D] at positions `at` [n]."""
        return self._centre(x) * (self.scale if at is None else self.scale[at]) * self.gain

    def pull(self, g: Tensor, at: Tensor | None = None) -> Tensor:
        """The transpose of `push`."""
        return self._centre(g * self.gain) * (self.scale if at is None else self.scale[at])


def push(norm: Norm | None, x: Tensor, at: Tensor | None = None) -> Tensor:
    """`norm.push`, or x where the family has no such norm."""
    return x if norm is None else norm.push(x, at)


def pull(norm: Norm | None, g: Tensor, at: Tensor | None = None) -> Tensor:
    """`norm.pull`, or g where the family has no such norm."""
    return g if norm is None else norm.pull(g, at)

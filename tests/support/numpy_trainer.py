"""A training that really allocates: layers of element-wise units with Adam, in NumPy. For `stoker fit`.

Arrays stay from step to step, as the allocators of frameworks keep theirs. Says at its end how much memory it took.
"""

import argparse
import resource
import sys

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
FEATURES = 32 * 1024
LAYERS = 12


class Layer:
    """weight · x, squashed. Adam's state appears at its first step."""

    def __init__(self, generator: np.random.Generator, batch: int) -> None:
        self.weight: Array = generator.standard_normal(FEATURES, dtype=np.float32)
        self.out: Array = np.zeros((batch, FEATURES), dtype=np.float32)
        self.moments: tuple[Array, Array] | None = None

    def forward(self, x: Array) -> Array:
        np.multiply(x, self.weight, out=self.out)
        return np.tanh(self.out, out=self.out)

    def update(self, gradient: Array) -> None:
        if self.moments is None:
            self.moments = np.zeros_like(self.weight), np.zeros_like(self.weight)
        first, second = self.moments
        first += 0.1 * (gradient - first)
        second += 0.001 * (gradient**2 - second)
        self.weight -= 1e-3 * first / (np.sqrt(second) + 1e-8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_iters", type=int, default=10)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    layers = [Layer(generator, options.batch_size) for _ in range(LAYERS)]
    data = np.ones((options.batch_size, FEATURES), dtype=np.float32)
    for step in range(options.max_iters):
        x = data
        for layer in layers:
            x = layer.forward(x)
        for layer in layers:
            layer.update(layer.out.mean(axis=0))
        sys.stdout.write(f"step {step}: loss {float(np.abs(x).mean()):.4f}\n")
        sys.stdout.flush()
    sys.stdout.write(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}\n")


if __name__ == "__main__":
    main()

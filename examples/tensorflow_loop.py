"""TensorFlow without Keras: a tf.Module learns digits in a loop of its own, with a compiled
GradientTape step, a shuffled tf.data set and random augmentation.

    python examples/tensorflow_loop.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it goes on with the next batch of the same epoch. However often you
interrupt it, it ends with the same hash of the weights.
"""

import argparse
import hashlib

import numpy as np
import tensorflow as tf

import holdfast

# Digits as a pocket calculator draws them: seven strokes in an image of 14 by 14.
STROKES = {
    **{"a": np.s_[2:3, 4:10], "g": np.s_[6:7, 4:10], "d": np.s_[11:12, 4:10]},
    **{"f": np.s_[2:7, 4:5], "b": np.s_[2:7, 9:10], "e": np.s_[7:12, 4:5], "c": np.s_[7:12, 9:10]},
}
DIGITS = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]


def draw_digits(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Each digit faded, moved and made noisy."""
    rng = np.random.default_rng(seed)
    images = 0.3 * rng.standard_normal((size, 14, 14)).astype(np.float32)
    for number, image in enumerate(images):
        drawn = np.zeros_like(image)
        for name in DIGITS[number % 10]:
            drawn[STROKES[name]] = 0.4 + 0.6 * rng.random()
        image += np.roll(drawn, rng.integers(-2, 3, 2), (0, 1))
    return images.reshape(size, -1), np.arange(size) % 10


class Net(tf.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        first = tf.random.stateless_normal([196, hidden], [0, 1], stddev=0.1)
        second = tf.random.stateless_normal([hidden, 10], [0, 2], stddev=0.1)
        self.layers = [tf.Variable(first), tf.Variable(tf.zeros(hidden)), tf.Variable(second)]
        self.speeds = [tf.Variable(tf.zeros_like(v), trainable=False) for v in self.layers]
        self.generator = tf.random.Generator.from_seed(3)  # part of a module, and so of the state

    def __call__(self, images: tf.Tensor, *, trains: bool = False) -> tf.Tensor:
        first, bias, second = self.layers
        hidden = tf.nn.relu(images @ first + bias)
        if trains:
            hidden *= tf.cast(self.generator.uniform(tf.shape(hidden)) > 0.2, tf.float32) / 0.8
        return hidden @ second

    @tf.function
    def learn(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            scores = self(images, trains=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.layers)
        for weight, speed, gradient in zip(self.layers, self.speeds, gradients, strict=True):
            speed.assign(0.9 * speed + gradient)
            weight.assign_sub(0.05 * speed)
        return loss


def evaluate(net: Net, images: np.ndarray, labels: np.ndarray) -> float:
    return float((tf.argmax(net(images), 1).numpy() == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/tensorflow-loop", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=4000, help="images in an epoch")
    options = parser.parse_args()

    tf.random.set_seed(0)
    test_data = draw_digits(1000, seed=2)
    data = tf.data.Dataset.from_tensor_slices(draw_digits(options.size, seed=1))
    data = data.shuffle(1000, seed=4).batch(50).prefetch(2)
    net = Net(hidden=64)
    with holdfast.Run(options.folder, net=net) as run:
        for _ in run.epochs(options.epochs):
            for images, labels in run.batches(data):
                images += tf.random.normal(tf.shape(images), stddev=0.1)  # by the global seed
                run.log(loss=net.learn(images, labels))
            with run.phase("eval"):
                run.log(accuracy=evaluate(net, *test_data))

    weights = b"".join(variable.numpy().tobytes() for variable in net.layers)
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"accuracy {evaluate(net, *test_data):.1%}, weights {digest}")


if __name__ == "__main__":
    main()

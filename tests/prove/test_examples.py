"""Every example ends as if it had never been interrupted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast._tools.prove.report import plain_text
from tests.examples.test_examples import EXAMPLES, SIZES, framework_of, layer_of

STATUS = {"INT": 130, "TERM": 143, "USR2": 75, "QUIT": -3, "KILL": -9}
LONG = (
    *("small_gpt", "mnist_cnn", "accumulation", "mixed_precision", "reinforce", "ddp"),
    *("tf_distributed", "keras_fit", "jax_optax", "lightning_fit", "accelerate_loop"),
    "transformers_trainer",
)
# Of those that take seconds to start, few: tests/everywhere interrupts the same frameworks often.
KILLS = {"tensorflow_loop": 2, "keras_fit": 2, "jax_optax": 3, "lightning_fit": 3}
KILLS |= {"accelerate_loop": 3, "transformers_trainer": 3}
IN_THE_LOOP = ("step", "update", "gradient", "boundary")


def last_line(course: Path) -> str:
    """What a course said in the end: a line with a hash of the weights."""
    newest = max(course.glob("output-*.txt"), key=lambda path: int(path.stem.split("-")[1]))
    said = [line for line in newest.read_text().splitlines() if not line.startswith("holdfast: ")]
    assert re.search(r"weights [0-9a-f]{16}$", said[-1]), newest.read_text()
    return said[-1]


@pytest.mark.nightly  # tests/everywhere interrupts a training of each framework
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=[pytest.mark.layer(layer_of(n)), *([pytest.mark.nightly] * (n in LONG))]
        )
        for n in SIZES
    ],
)
def test_an_example_is_equal_to_the_bit(name, prove, tmp_path):
    wishes = {"kills": KILLS.get(name, 6), "seed": 5, "keep": tmp_path / "kept"}
    framework = framework_of(name)
    proof = prove(EXAMPLES / f"{name}.py", *SIZES[name].split(), framework=framework, **wishes)
    assert proof.verdict == "equal", plain_text(proof)
    assert len(proof.interruptions) == wishes["kills"]
    for each in proof.interruptions:
        if each.moment in IN_THE_LOOP and each.signal != "STOP":
            assert each.status == STATUS[each.signal], plain_text(proof)
    courses = sorted(Path(proof.kept).glob("*/output-1.txt"))
    assert len(courses) >= 3
    assert len({last_line(path.parent) for path in courses}) == 1

"""On a GPU: its generator, half precision, and sums that are added up in no fixed order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast._tools.prove.proof import Proof, ProofRequest, Watcher
from holdfast._tools.prove.prove import prove
from holdfast._tools.prove.report import plain_text
from tests.examples.test_examples import EXAMPLES, SIZES

torch = pytest.importorskip("torch", reason="pip install torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SCRIPT = Path(__file__).parent / "on_gpu" / "half.py"


def run(folder: Path, text: str, *arguments: str, kills: int = 4) -> Proof:
    (folder / "train.py").write_text(text)
    command = (sys.executable, "train.py", *arguments)
    signals = ("KILL", "TERM", "INT")
    return prove(ProofRequest(command, kills=kills, signals=signals, folder=folder), Watcher())


def test_half_precision_is_equal(tmp_path):
    proof = run(tmp_path, SCRIPT.read_text())
    assert proof.verdict == "equal", plain_text(proof)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('scaler.load_state_dict(kept["scaler"])', "scaler-not-saved"),
        ('torch.cuda.set_rng_state(kept["gpu"].cpu())', "generator-not-restored"),
    ],
)
def test_what_is_forgotten_on_a_gpu_is_found(tmp_path, line, cause):
    text = SCRIPT.read_text()
    assert line in text
    proof = run(tmp_path, text.replace(line, "pass"))
    assert proof.difference is not None, plain_text(proof)
    assert proof.difference.cause == cause, plain_text(proof)


def test_sums_in_no_fixed_order_are_told(tmp_path):
    # Many numbers are added to one place by atomic operations, as they come.
    text = SCRIPT.read_text().replace(
        "loss = nn.functional.mse_loss(model(inputs[done]), wanted[done])",
        "places = torch.arange(400_000, device='cuda')\n"
        "        many = model(inputs[done]).float()[0] * places[:, None].sin()\n"
        "        sums = torch.zeros(7, 4, device='cuda').index_add_(0, places % 7, many)\n"
        "        loss = (sums - wanted[done][:7]).square().mean()",
    )
    proof = run(tmp_path, text)
    assert proof.verdict == "not repeatable", plain_text(proof)
    assert proof.unrepeatable is not None
    assert proof.unrepeatable.cause == "nondeterministic-kernels", plain_text(proof)


def test_the_example_in_mixed_precision_is_equal(tmp_path):
    text = (EXAMPLES / "mixed_precision.py").read_text()
    proof = run(tmp_path, text, *SIZES["mixed_precision"].split())
    assert proof.verdict == "equal", plain_text(proof)

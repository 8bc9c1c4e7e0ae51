"""Small things under the names that the pages use without making them.

Each is as the page means it: a model that trains, a loader with a few batches. What is
asked for and not here is an error of the page's marker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def of_torch() -> dict[str, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
    calls = iter(range(5))

    def train_on(images: Any, labels: Any) -> None:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return {
        "model": model,
        "net": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "data": data,
        "loader": DataLoader(data, batch_size=4),
        "device": "cpu",
        "loss": torch.tensor(0.5),
        "norm": torch.tensor(1.0),
        "train_on": train_on,
        "train_one_step": lambda: train_on(*data[:4]),
        "converged": lambda: next(calls, None) is None,
        "evaluate": lambda: 0.5,
        "export": lambda _model: None,
        "loss_of": lambda batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "DistributedDataParallel": DistributedDataParallel,
    }


def of_tensorflow() -> dict[str, Any]:
    import keras
    import tensorflow as tf

    def make_model() -> tuple[Any, Any]:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    model, optimizer = make_model()
    inputs, labels = tf.random.normal((12, 4)), tf.zeros((12,), tf.int64)

    def train_step(*_batch: Any) -> Any:
        return tf.constant(0.5)

    return {
        "tf": tf,
        "model": model,
        "optimizer": optimizer,
        "generator": tf.random.Generator.from_seed(1),
        "dataset": tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(4),
        "train_step": train_step,
        "make_model": make_model,
    }


def of_keras() -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    inputs, targets = np.zeros((12, 4), "float32"), np.zeros((12, 2), "float32")
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(4)
    return {"model": model, "data": data}


def of_jax() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    def train_step(params: Any, opt_state: Any, *key: Any) -> tuple[Any, ...]:
        return params, opt_state + 1, *key, jnp.float32(0.5)

    return {
        "params": {"w": jnp.ones((2, 2))},
        "opt_state": jnp.int32(0),
        "key": jax.random.key(0),
        "train_step": train_step,
    }


def of_lightning() -> dict[str, Any]:
    import lightning
    import torch

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 3)

        def training_step(self, batch: list[Any]) -> Any:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    return {"lightning": lightning, "module": Net(), "loader": of_torch()["loader"]}


def of_transformers() -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2, bos_token_id=0)
    words = torch.zeros(4, dtype=torch.int64)
    return {
        "Trainer": Trainer,
        "model": GPT2LMHeadModel(config),
        "arguments": TrainingArguments(
            "output", report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True
        ),
        "data": [{"input_ids": words, "labels": words} for _ in range(8)],
    }


def of_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    return {**of_torch(), "accelerator": accelerator}


OF: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": of_torch,
    "tensorflow": of_tensorflow,
    "keras": of_keras,
    "jax": of_jax,
    "lightning": of_lightning,
    "transformers": of_transformers,
    "accelerate": of_accelerate,
}

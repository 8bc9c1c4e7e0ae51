"""JAX: a compiled step, Adam of optax, a key that is split at every step; state is a value."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import task

import holdfast

optimizer = optax.adam(task.RATE)


def predict(params, inputs, key=None):
    hidden = jnp.tanh(inputs @ params["first"])
    if key is not None:
        hidden *= jax.random.bernoulli(key, 1 - task.DROPPED, hidden.shape)
    return hidden @ params["second"]


# The buffers of the old state are given away: a snapshot must not need them.
@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def learn(params, opt_state, key, inputs, targets):
    key, dropout = jax.random.split(key)

    def loss_of(params):
        return jnp.mean((predict(params, inputs, dropout) - targets) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, key, loss


@jax.jit
def evaluate(params):
    return jnp.mean((predict(params, task.INPUTS) - task.TARGETS) ** 2)


np.random.seed(3)
params = {
    "first": jnp.asarray(task.initial(6, task.HIDDEN)),
    "second": jnp.asarray(task.initial(task.HIDDEN, 1)),
}
state = {"params": params, "opt_state": jax.jit(optimizer.init)(params), "key": jax.random.key(3)}
with holdfast.Run(task.FOLDER, settings=task.SETTINGS, **state) as run:
    params, opt_state, key = (run.state[name] for name in ("params", "opt_state", "key"))
    for _ in run.epochs(task.EPOCHS):
        order = np.random.permutation(task.SAMPLES).reshape(-1, task.BATCH)
        for chosen in run.batches(order):
            params, opt_state, key, loss = learn(
                params, opt_state, key, task.INPUTS[chosen], task.TARGETS[chosen]
            )
            run.update(params=params, opt_state=opt_state, key=key)
            run.log(loss=loss)
        with run.phase("eval"):
            run.log(val_loss=evaluate(params))

"""One process of a JAX job: `jax_train.py FOLDER TOTAL PORT RANK SIZE`.

Prints `ready STEP`, `step N` when a step is made, `left STEP` when it leaves by an exception, and
`hash HEX` of all that this process holds of the state; alone, also `whole HEX` of the arrays.
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast

_ROWS, _WIDTH = 8, 4


def main() -> None:
    folder, total, port, rank, size = sys.argv[1], *map(int, sys.argv[2:6])
    if size > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices, ("data", "model"))

    def laid_out(values: Any, *axes: Any) -> Any:
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    weights = np.linspace(-1, 1, _ROWS * _WIDTH, dtype=np.float32).reshape(_ROWS, _WIDTH)
    params = {
        "rows": laid_out(weights, "data"),
        "columns": laid_out(weights, None, "model"),
        "both": laid_out(weights, "model", "data"),
        "bias": laid_out(np.zeros(_WIDTH, np.float32)),
    }
    keys = jax.jit(
        lambda: jax.random.split(jax.random.key(0), 4),
        out_shardings=NamedSharding(mesh, PartitionSpec("data")),
    )()
    own = np.zeros(3)  # this process's own
    count: Any = 0  # a number of Python's, which the first step makes an array of a weak type
    sharding = NamedSharding(mesh, PartitionSpec())

    @jax.jit
    def step(params: Any, keys: Any, count: Any) -> Any:
        keys = jax.vmap(lambda key: jax.random.split(key)[0])(keys)
        noise = jax.lax.with_sharding_constraint(jax.random.normal(keys[0], (_WIDTH,)), sharding)
        return jax.tree.map(lambda x: x * 0.9 + jnp.mean(x) * noise, params), keys, count + 1

    settings = holdfast.Settings(max_overhead=1.0, checkpoint_every="10h")
    run = holdfast.Run(folder, settings=settings, params=params, keys=keys, own=own, count=count)
    try:
        with run:
            params, keys, count = (run.state[name] for name in ("params", "keys", "count"))
            print("ready", run.step, flush=True)
            for number in run.steps(total):
                params, keys, count = step(params, keys, count)
                own += rank + number
                run.update(params=params, keys=keys, count=count)
                jax.block_until_ready(params)
                time.sleep(0.05)  # so that the test can reach it in the middle
                print("step", number + 1, flush=True)
    except BaseException:  # told to the test, and raised again
        print("left", run.step, flush=True)
        raise
    assert count.weak_type
    assert int(count) == total
    digest = hashlib.sha256(own.tobytes())
    for array in [*jax.tree.leaves(params), jax.random.key_data(keys)]:
        for shard in array.addressable_shards:
            digest.update(np.asarray(shard.data).tobytes())
    print("hash", digest.hexdigest(), flush=True)
    if size == 1:
        whole = hashlib.sha256()
        for array in [*jax.tree.leaves(params), jax.random.key_data(keys)]:
            whole.update(np.asarray(array).tobytes())
        print("whole", whole.hexdigest(), flush=True)


if __name__ == "__main__":
    main()

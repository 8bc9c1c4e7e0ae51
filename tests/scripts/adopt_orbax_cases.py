"""Cases of adopting checkpoints of Orbax, in one process: JAX forks badly, and starts slowly.

python adopt_orbax_cases.py FOLDER [CASE]...
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tests.scripts.adopting import command, refused, run_all

import holdfast

logging.getLogger("absl").setLevel(logging.ERROR)
TX = optax.adamw(1e-2)


@flax.struct.dataclass
class Net:
    kernel: jax.Array
    bias: jax.Array


def values(seed=0, width=3):
    first, second = jax.random.split(jax.random.key(seed))
    params = {
        "layers": [Net(jax.random.normal(first, (4, width)), jnp.zeros(width, jnp.bfloat16))],
        "scale": jax.random.normal(second, (width,)).astype(jnp.float16),
        "count": jnp.array(seed, jnp.int8),
    }
    return {"params": params, "opt_state": TX.init(params["layers"]), "key": jax.random.key(seed)}


def trained(state, steps):
    """The state after so many steps."""
    params, opt_state, key = state["params"], state["opt_state"], state["key"]
    for _ in range(steps):
        key, used = jax.random.split(key)
        net = params["layers"]
        grads = jax.tree.map(lambda x, k=used: jax.random.normal(k, x.shape, x.dtype), net)
        updates, opt_state = TX.update(grads, opt_state, net)
        params = {**params, "layers": optax.apply_updates(net, updates)}
    return {"params": params, "opt_state": opt_state, "key": key}


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (jax.random.key_data(x) if x.dtype.name.startswith("key") else x for x in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def saved(folder, state):
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder, state)


def taken(run):
    return {name: run.state[name] for name in ("params", "opt_state", "key")}


def case_a_tree_goes_on_to_the_bit(here):
    first = trained(values(), 3)
    saved(here / "ck", {**first, "step": 3})
    told = command("adopt", here / "run", "--from", here / "ck")
    assert "step 3 (by step)" in told, told
    assert "(Orbax)" in told, told
    with holdfast.Run(here / "run", **values(seed=5), step=0) as run:
        assert (run.step, run.state["step"]) == (3, 3)
        same(taken(run), first)
        state = taken(run)
        for _ in run.steps(5):
            state = trained(state, 1)
            run.update(**state)
    same(state, trained(first, 2))
    with holdfast.Run(here / "run", **values(seed=6), step=0) as run:
        assert run.step == 5
        same(taken(run), state)


def case_the_newest_of_a_manager(here):
    kept = {}
    with ocp.CheckpointManager(here / "ck") as manager:
        for step in (7, 12):
            kept[step] = trained(values(), step)
            manager.save(step, args=ocp.args.StandardSave(kept[step]))
    for source, step in ((here / "ck", 12), (here / "ck" / "7", 7)):
        run = here / f"run-{step}"
        told = command("adopt", run, "--from", source)
        assert f"step {step} (by its folder)" in told, told
        with holdfast.Run(run, **values(seed=5)) as opened:
            assert opened.step == step
            same(taken(opened), kept[step])


def case_several_items(here):
    first = trained(values(), 2)
    items = {"weights": first["params"], "optimizer": first["opt_state"]}
    with ocp.CheckpointManager(here / "ck") as manager:
        parts = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        about = ocp.args.JsonSave({"a": 1})
        manager.save(2, args=ocp.args.Composite(**parts, about=about))
    names = ("--name", "params=weights", "--name", "opt_state=optimizer", "--fresh", "key")
    told = command("adopt", here / "run", "--from", here / "ck", *names)
    assert "Left out: about." in told, told
    mine = values(seed=5)
    with holdfast.Run(here / "run", **mine) as run:
        same(taken(run), {**first, "key": mine["key"]})


def case_what_does_not_fit(here):
    saved(here / "ck", values())
    command("adopt", here / "run", "--from", here / "ck", "--step", 1)
    told = refused(here / "run", **values(width=2))
    assert "params.layers.0.kernel (float32 [4, 3] → float32 [4, 2])" in told.replace(
        "<f4", "float32"
    ), told
    more = values()
    more["params"]["more"] = jnp.ones(2)
    told = refused(here / "run", **more)
    assert "not in the checkpoint: params.more" in told, told
    less = values()
    del less["params"]["scale"]
    told = refused(here / "run", **less)
    assert "only in the checkpoint: params.scale" in told, told
    with holdfast.Run(here / "run", **values(seed=4)) as run:
        same(taken(run), values())


def case_a_damaged_one_is_two_lines(here):
    saved(here / "ck", values())
    shutil.rmtree(here / "ck" / "ocdbt.process_0")
    for path in (here / "ck" / "d").iterdir():
        path.write_bytes(b"")
    told = command("adopt", here / "run", "--from", here / "ck", "--step", 1, status=1)
    # Threads of Orbax may have something to say before.
    assert "cannot be read (" in told.splitlines()[-2], told
    assert not (here / "run").exists()


if __name__ == "__main__":
    cases = [name for name in globals() if name.startswith("case_")]
    run_all(Path(sys.argv[1]), {name: globals()[name] for name in sys.argv[2:] or cases})

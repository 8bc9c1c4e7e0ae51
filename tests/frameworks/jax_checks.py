"""What holds for arrays of JAX and for a run that has them. Started by jax_support.py."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_support import (
    assert_same,
    bits,
    emptied,
    heard,
    mesh_of,
    refused,
    restore,
    round_trip,
    store,
)

import holdfast
from holdfast.rules import NotFinite


class Pair(NamedTuple):
    first: Any
    second: Any


# -- arrays ---------------------------------------------------------------------


def check_every_type_comes_back_to_the_bit(folder: Path) -> None:
    names = ["bool", "int8", "uint16", "int32", "uint32", "float16", "float32", "complex64"]
    names += ["bfloat16", "int2", "int4", "uint4", "float4_e2m1fn", "float8_e8m0fnu"]
    names += [n for n in dir(ml_dtypes) if n.startswith("float8_") and n != "float8_e8m0fnu"]
    saved = {name: jnp.asarray(np.array([0, 1, 1, 0, 1], np.dtype(name))) for name in names}
    saved["odd"] = jnp.asarray([np.nan, -0.0, np.inf], jnp.float32)
    saved["empty"] = jnp.zeros((0, 3))
    saved["number"] = jnp.float32(1.5)
    saved["transposed"] = jnp.arange(6.0).reshape(2, 3).T
    assert_same(round_trip(folder, saved, emptied(saved)), saved)


def check_keys_old_and_new_come_back(folder: Path) -> None:
    saved: dict[str, Any] = {
        impl: jax.random.key(7, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg")
    }
    saved["old"] = jax.random.PRNGKey(7)
    saved["several"] = jax.random.split(jax.random.key(3), (2, 3))
    saved["none"] = jax.random.split(jax.random.key(3), 0)
    fresh = {name: jnp.zeros_like(key) if name == "old" else key for name, key in saved.items()}
    fresh["rbg"] = jax.random.key(1, impl="rbg")
    fresh["several"] = jax.random.split(jax.random.key(4), (2, 3))
    now = round_trip(folder, saved, fresh)
    assert_same(now, saved)
    drawn = [jax.random.normal(key["several"][1, 2], (3,)) for key in (now, saved)]
    assert bits(drawn[0]) == bits(drawn[1])
    with refused(holdfast.StateMismatch, r"key<rbg>.*key<threefry2x32>"):
        restore(folder, value={**saved, "rbg": jax.random.key(1)})


def check_weak_types_stay_weak(folder: Path) -> None:
    saved = {"number": jnp.asarray(2.0), "many": jnp.asarray(1) + jnp.broadcast_to(1, (3,))}
    saved["many"] = jax.jit(lambda x: jnp.broadcast_to(x, (3,)))(3)
    saved["strong"] = jnp.float32(1)
    assert saved["many"].weak_type
    now = round_trip(folder, saved, {**saved, "number": jnp.float32(0)})
    assert_same(now, saved)
    half = jnp.ones(3, jnp.bfloat16)
    assert (half * now["number"]).dtype == jnp.bfloat16
    assert (jax.jit(lambda x: x + 1)(now["many"])).tolist() == [4, 4, 4]


def check_what_was_not_put_anywhere_is_not_afterwards(folder: Path) -> None:
    device = jax.devices()[2]
    saved = {"free": jnp.ones(3), "put": jax.device_put(jnp.ones(3), device)}
    now = round_trip(folder, saved, {"free": jnp.zeros(3), "put": jnp.zeros(3)})
    assert (now["free"].committed, now["put"].committed) == (False, True)
    assert now["put"].devices() == {device}
    other = jax.device_put(jnp.zeros(3), jax.devices()[1])
    now = restore(folder, value={"free": jnp.zeros(3), "put": other})["value"]
    assert now["put"].devices() == other.devices()


def check_numbers_and_numpy_become_what_was_stored(folder: Path) -> None:
    store(folder, count=jnp.int32(3), weights=jnp.ones(2))
    now = restore(folder, count=0, weights=np.zeros(2, np.float32))
    assert_same(now, {"count": jnp.int32(3), "weights": jnp.ones(2)})


# -- sharded --------------------------------------------------------------------


def check_sharded_arrays_come_back_as_they_are_laid_out_now(folder: Path) -> None:
    over_four = NamedSharding(mesh_of(4), PartitionSpec("x"))
    keys = jax.random.split(jax.random.key(0), 8)
    saved = {
        "rows": jax.device_put(jnp.arange(32.0).reshape(8, 4), over_four),
        "columns": jax.device_put(
            jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh_of(4), PartitionSpec(None, "x"))
        ),
        "everywhere": jax.device_put(jnp.arange(3.0), NamedSharding(mesh_of(4), PartitionSpec())),
        "keys": jax.device_put(keys, over_four),
        "count": jax.device_put(jnp.int32(3), NamedSharding(mesh_of(4), PartitionSpec())),
    }
    fresh = {
        name: value if name == "keys" else jax.device_put(jnp.zeros_like(value), value.sharding)
        for name, value in saved.items()
    }
    now = round_trip(folder, saved, fresh)
    assert_same(now, saved)
    for name, value in saved.items():
        assert now[name].sharding == value.sharding, name
    # What was not put anywhere yet is put where it was, as the script had come to it.
    now = restore(folder, value=dict.fromkeys(saved) | {"rows": jnp.zeros((8, 4)), "keys": keys})
    for name, value in saved.items():
        assert now["value"][name].sharding == value.sharding, name
    assert_same(now["value"], saved)
    # A step may return other parts than the script begins with: on the same mesh they stay.
    everywhere = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh_of(4), PartitionSpec()))
    again = restore(folder, value=fresh | {"rows": everywhere})["value"]["rows"]
    assert again.sharding == over_four


def check_another_number_of_devices(folder: Path) -> None:
    values = jnp.arange(32.0).reshape(8, 4)
    store(folder, value=jax.device_put(values, NamedSharding(mesh_of(4), PartitionSpec("x"))))
    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    for sharding in (
        NamedSharding(mesh_of(2, "y"), PartitionSpec(None, "y")),
        NamedSharding(square, PartitionSpec("b", "a")),
        SingleDeviceSharding(jax.devices()[3]),
    ):
        fresh = jax.device_put(jnp.zeros((8, 4)), sharding)
        now = restore(folder, value=fresh)["value"]
        assert now.sharding == sharding
        assert bits(now) == bits(values)


# -- what a run does --------------------------------------------------------------


def check_donated_buffers_do_not_break_a_snapshot(folder: Path) -> None:
    optimizer = optax.adam(1e-2)
    every_step = holdfast.Settings(checkpoint_every=1)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, opt_state: Any, key: Any) -> Any:
        key, used = jax.random.split(key)
        x = jax.random.normal(used, (4, 3))
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, key

    def train(folder: Path, steps: int) -> Any:
        params: Any = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
        opt_state: Any = optimizer.init(params)
        key: Any = jax.random.key(0)
        with holdfast.Run(
            folder, settings=every_step, params=params, opt_state=opt_state, key=key
        ) as run:
            params, opt_state, key = (run.state[n] for n in ("params", "opt_state", "key"))
            for _ in run.steps(steps):
                params, opt_state, key = step(params, opt_state, key)
                run.update(params=params, opt_state=opt_state, key=key)
        return [*map(bits, jax.tree.leaves((params, opt_state, key)))]

    expected = train(folder / "whole", 9)
    train(folder / "cut", 4)
    assert train(folder / "cut", 9) == expected
    with refused(holdfast.UnstorableState, r"params\.w: the memory of this array", "run.update"):
        params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
        with holdfast.Run(folder / "not", settings=every_step, params=params) as run:
            for _ in run.steps(3):
                step(params, optimizer.init(params), jax.random.key(1))


def check_tracers_are_refused(folder: Path) -> None:
    def leaky(run: Any, x: Any) -> Any:
        run.update(params=(x, x))
        return x

    with (
        refused(holdfast.UnstorableState, r"params\.0: a tracer", "run.update"),
        holdfast.Run(folder, params=(jnp.ones(2), jnp.ones(2))) as run,
    ):
        run.update(params=(jnp.zeros(2), jnp.zeros(2)))
        jax.jit(partial(leaky, run))(jnp.ones(2))


def check_restored_values_must_be_taken(folder: Path) -> None:
    state = Pair(jnp.ones(2), jnp.ones(3))
    store(folder, params=state, plain={"w": jnp.ones(1)}, best=0.5)
    plain = {"w": jnp.zeros(1)}
    with holdfast.Run(folder, params=state, plain=plain, best=0.0) as run:
        assert plain["w"].tolist() == [1.0]  # a dict of the script's own is filled
        run.update(plain={"w": jnp.zeros(1)}, best=0.3)
        with refused(holdfast.HoldfastError, r'params = run.state\["params"\]'):
            run.update(params=state)
        params = run.state["params"]
        run.update(params=params)
    with holdfast.Run(folder, params=state, plain=plain, best=0.0) as run, heard() as said:
        run.update(best=run.state["best"])
        for _ in range(2):
            run.update(params=state)  # some were taken, and not this one
    assert sum("params was restored" in line for line in said) == 1, said


def check_a_loop_that_hands_nothing_over_is_told(folder: Path) -> None:
    every_step = holdfast.Settings(checkpoint_every=1)
    with (
        heard() as said,
        holdfast.Run(folder / "not", settings=every_step, params={"w": jnp.ones(2)}) as run,
    ):
        for _ in run.steps(6):
            time.sleep(0.001)  # so that there is time for several snapshots
    assert sum("no array of the state has changed" in line for line in said) == 1, said
    with (
        heard() as said,
        holdfast.Run(folder / "done", settings=every_step, params={"w": jnp.ones(2)}) as run,
    ):
        for number in run.steps(6):
            run.update(params={"w": jnp.full(2, number)})
    assert not any("no array" in line for line in said), said


def check_a_key_that_is_left_out_of_the_updates_is_told(folder: Path) -> None:
    params, key = {"w": jnp.zeros(3)}, jax.random.key(0)
    with heard() as said, holdfast.Run(folder, params=params, key=key) as run:
        for step in run.steps(15):
            run.update(params={"w": jnp.full(3, step)})
    assert sum("key is never handed over" in line for line in said) == 1, said
    assert any("run.update(params=params, key=key)" in line for line in said), said


def check_arrays_that_are_nan_in_all_saved_states_leave_none_of_them(folder: Path) -> None:
    settings = holdfast.Settings(checkpoint_every=1)
    given = {"settings": settings, "stop_when": NotFinite(), "params": {"w": jnp.zeros(3)}}
    with refused(holdfast.Stopped), holdfast.Run(folder, **given) as run:
        for step in run.steps(6):
            run.update(params={"w": jnp.full(3, jnp.nan)})
            if step == 4:
                run.log(loss=float("nan"))
    assert list((folder / "checkpoints").iterdir()) == []


def check_what_does_not_fit_is_named(folder: Path) -> None:
    store(folder, params=Pair(jnp.ones((2, 3)), 1), opt_state=optax.adam(1e-3).init(1.0))
    with refused(holdfast.StateMismatch, r"params\.0 \(float32 \[2, 3\] → float32 \[2, 4"):
        restore(folder, params=Pair(jnp.ones((2, 4)), 1), opt_state=optax.adam(1e-3).init(1.0))
    with refused(holdfast.StateMismatch, "params"):
        restore(folder, params=jnp.ones(2), opt_state=optax.adam(1e-3).init(1.0))


def check_another_optimizer_is_refused(folder: Path) -> None:
    params = {"w": jnp.ones(2)}
    store(folder, opt_state=optax.adam(1e-3).init(params))
    with refused(holdfast.StateMismatch, "opt_state"):
        restore(folder, opt_state=optax.sgd(1e-3, momentum=0.9).init(params))


def check_another_layer_is_refused(folder: Path) -> None:
    store(folder, params={"w": jnp.ones(2)})
    with refused(holdfast.StateMismatch, r"not in the checkpoint: params\.more"):
        restore(folder, params={"w": jnp.ones(2), "more": jnp.ones(2)})


def check_one_value_under_two_names_may_part(folder: Path) -> None:
    params = {"w": jnp.ones(2)}
    with holdfast.Run(folder, params=params, target=params) as run:
        for _ in run.steps(1):
            run.update(params={"w": jnp.full(2, 5.0)})
    fresh = {"w": jnp.zeros(2)}
    now = restore(folder, params=fresh, target=fresh)
    assert (now["params"]["w"].tolist(), now["target"]["w"].tolist()) == ([5.0, 5.0], [1.0, 1.0])


def check_types_of_64_bits_are_spoken_of(folder: Path) -> None:
    with jax.enable_x64(True):
        store(folder, params={"w": jnp.ones(2)})
        assert restore(folder, params={"w": jnp.zeros(2)})["params"]["w"].dtype == jnp.float64
    with refused(holdfast.StateMismatch, r"params\.w: stored as float64 of jax", "JAX_ENABLE_X64"):
        restore(folder, params={"w": jnp.zeros(2)})


def check_a_changed_setting_is_told(folder: Path) -> None:
    store(folder, key=jax.random.key(0))
    with (
        heard() as said,
        jax.threefry_partitionable(False),
        holdfast.Run(folder, key=jax.random.key(0)) as run,
    ):
        for _ in run.steps(2):
            pass
    assert any("jax_threefry_partitionable, which was True and is False" in s for s in said), said


def check_an_update_costs_little(folder: Path) -> None:
    params = {f"layer {i}": {"w": jnp.ones(2), "b": jnp.ones(1)} for i in range(250)}
    with holdfast.Run(folder, params=params) as run:
        costs = []
        for _ in range(50):
            params = jax.tree.map(lambda x: x, params)
            began = time.perf_counter()
            run.update(params=params)
            costs.append(time.perf_counter() - began)
    assert min(costs) < 1e-3, f"{min(costs) * 1e6:.0f} µs for 500 arrays"

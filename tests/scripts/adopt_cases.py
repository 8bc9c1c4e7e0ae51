"""Cases of adopting and exporting checkpoints of TensorFlow, all in one process.

TensorFlow takes seconds to import, and a thread of it in the tests' own process would make every
fork there unsafe. Each case runs in a folder of its own; what came of it is written as JSON.

    python adopt_cases.py FOLDER [CASE]...
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf
from tests.scripts.adopting import command, refused, run_all

import holdfast

X = np.random.RandomState(0).rand(32, 4).astype(np.float32)
Y = X.sum(1, keepdims=True)


def net(units=3, dtype=None):
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(units, dtype=dtype),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1),
        ]
    )


def train(model, optimizer, generator=None):
    noise = 0.0 if generator is None else generator.normal(X.shape)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.cast(model(X + noise, training=True), tf.float32) - Y) ** 2)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)


def same(one, other):
    pairs = list(zip(one.variables, other.variables, strict=True))
    assert pairs
    for a, b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, (a.dtype, b.dtype)
        assert a.tobytes() == b.tobytes(), (one, a, b)


def saved(folder, steps=3, keep=3, optimizer=None, **more):
    """What a script with a manager leaves; a checkpoint after each step."""
    model = net()
    optimizer = optimizer or keras.optimizers.Adam(1e-2)
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step, **more)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=keep)
    for _ in range(steps):
        train(model, optimizer, more.get("generator"))
        step.assign_add(1)
        manager.save()
    return model, optimizer


def case_goes_on_as_after_restore(here):
    data = tf.data.Dataset.from_tensor_slices(X).shuffle(9, seed=1)
    generator = tf.random.Generator.from_seed(5)
    model, optimizer = saved(here / "ck", iterator=iter(data), generator=generator)
    for _ in range(4):
        train(model, optimizer, generator)
    told = command("adopt", here / "run", "--from", here / "ck")
    assert "step 3 (by optimizer/_iterations)" in told, told
    assert "Left out, for it is no variable with numbers: iterator." in told, told
    assert "whole" in command("verify", here / "run")
    mine, fresh = net(), keras.optimizers.Adam(1e-2)  # which has no moments yet
    noise = tf.random.Generator.from_seed(99)
    state = {"model": mine, "optimizer": fresh, "generator": noise, "step": 0, "best": 0.5}
    with holdfast.Run(here / "run", **state) as run:
        assert (run.step, run.state["step"], run.state["best"]) == (3, 3, 0.5)
        # Keras keeps the seeds of its layers where TensorFlow does not look.
        for a, b in zip(mine.variables, model.variables, strict=True):
            if "seed" in a.path:
                a.assign(b - [0, 4 if np.asarray(b)[1] >= 4 else 0])
        for _ in run.steps(7):
            train(mine, fresh, noise)
    for a, b in zip(
        [*mine.weights, *fresh.variables], [*model.weights, *optimizer.variables], strict=True
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), a.path
    assert np.array_equal(noise.state, generator.state)
    # From now on it is a run like any other.
    again, moments = net(), keras.optimizers.Adam(1e-2)
    moments.build(again.trainable_variables)
    state.update(model=again, optimizer=moments, generator=tf.random.Generator.from_seed(1))
    with holdfast.Run(here / "run", **state) as run:
        assert run.step == 7
        same(again, mine)
        same(moments, fresh)


def case_the_very_checkpoint_that_the_manager_had(here):
    model, optimizer = saved(here / "ck")
    command("adopt", here / "run", "--from", here / "ck")
    mine, fresh, step = net(), keras.optimizers.Adam(1e-2), tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=mine, optimizer=fresh, step=step)
    with holdfast.Run(here / "run", checkpoint=checkpoint, again=mine) as run:
        assert run.step == int(step) == 3
        same(fresh, optimizer)
        for a, b in zip(mine.weights, model.weights, strict=True):
            assert np.array_equal(a, b)


def case_a_named_one_and_an_epoch(here):
    saved(here / "ck", steps=4)
    for number, name in ((2, "ckpt-2"), (3, "ckpt-3.index")):
        run = here / f"run{number}"
        options = ("--epoch", 5) if number == 3 else ()
        command("adopt", run, "--from", here / "ck" / name, *options)
        with holdfast.Run(run, model=net(), optimizer=keras.optimizers.Adam(1e-2)) as opened:
            assert opened.step == number
            epochs = []
            for epoch in opened.epochs(6):
                epochs.append(epoch)
                for _ in opened.batches([1, 2]):
                    pass
            assert epochs == list(range(5 if number == 3 else 0, 6)), epochs


def case_a_compiled_model_and_a_root(here):
    def compiled():
        model = net()
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        return model

    model = compiled()
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    tf.train.Checkpoint(model).save(str(here / "ck" / "x"))
    command("adopt", here / "run", "--from", here / "ck", "--name", "model=.")
    mine = compiled()
    with holdfast.Run(here / "run", model=mine) as run:
        assert run.step == 4
        assert mine.optimizer.built
        for _ in run.steps(5):
            pass
    for a, b in zip(mine.weights, model.weights, strict=True):
        assert np.array_equal(a, b), a.path
    same(mine.optimizer, model.optimizer)
    command(
        "export", here / "run", here / "out", "--to", "tensorflow", "--only", "model", "--strip"
    )
    other = compiled()
    other.optimizer.build(other.trainable_variables)
    newest = tf.train.latest_checkpoint(str(here / "out"))
    tf.train.Checkpoint(other).restore(newest).assert_consumed()
    same(other.optimizer, model.optimizer)


class Parts(tf.Module):
    def __init__(self, start):
        super().__init__()
        self.scale = tf.Variable(tf.cast([start, 2.0], tf.bfloat16))
        self.steps = [tf.Variable(start, dtype=tf.float64), tf.Variable([True, start > 2])]
        self.by_name = {"half": tf.Variable(start, dtype=tf.float16)}
        self.tied = self.steps[0]


def case_there_and_back(here):
    def objects(start):
        generator = tf.random.Generator.from_seed(int(start))
        model = net(dtype="mixed_bfloat16")
        optimizer = keras.optimizers.SGD(1e-2, momentum=0.9, use_ema=True)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        optimizer.build(model.trainable_variables)
        many = [tf.Variable([start]), {"deep": tf.Variable(int(start))}]
        return {
            "model": model,
            "optimizer": optimizer,
            "parts": Parts(start),
            "generator": generator,
            "many": many,
        }

    first = objects(3.0)
    table = {3: "no string is its key", "x": [1, 2]}
    with holdfast.Run(here / "run", **first, best=1.0, table=table) as run:
        for _ in run.steps(2):
            train(first["model"], first["optimizer"], first["generator"])
    told = command("export", here / "run", here / "out", "--to", "tensorflow")
    assert "Left out, for tf.train.Checkpoint has no place for it: best, table" in told, told
    second = objects(1.0)
    newest = tf.train.latest_checkpoint(str(here / "out"))
    tf.train.Checkpoint(**second).restore(newest).assert_consumed()
    command("adopt", here / "back", "--from", here / "out", "--step", 2)
    third = objects(2.0)
    with holdfast.Run(here / "back", **third, table=table) as run:
        assert run.step == 2
    for other in (second, third):
        for name in ("optimizer", "parts"):
            same(other[name], first[name])
        for a, b in zip(other["model"].weights, first["model"].weights, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert np.array_equal(other["generator"].state, first["generator"].state)
        assert np.array_equal(other["many"][0], [3.0])
        assert int(other["many"][1]["deep"]) == 3
    # A folder of ours may be replaced, and no other.
    assert "is there already" in command(
        "export", here / "run", here / "out", "--to", "tensorflow", status=2
    )
    command("export", here / "run", here / "out", "--to", "tensorflow", "--force")
    (here / "out" / "mine.txt").touch()
    assert "no export to TensorFlow has left" in command(
        "export", here / "run", here / "out", "--to", "tensorflow", "--force", status=2
    )
    assert sorted(each.name for each in here.iterdir()) == ["back", "out", "run"]


def case_what_does_not_fit(here):
    saved(here / "ck")
    adopt = ("adopt", "--from", here / "ck")
    command(*adopt, here / "run")
    right = {"optimizer": keras.optimizers.Adam()}
    told = refused(here / "run", model=net(units=5), **right)
    assert "float32 [4, 3] → float32 [4, 5]" in told, told
    deeper = net()
    deeper.add(keras.layers.Dense(1))
    told = refused(here / "run", model=deeper, **right)
    assert "not in the checkpoint: model._functional._operations.5" in told, told
    shallow = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    told = refused(here / "run", model=shallow, **right)
    assert "only in the checkpoint: model._functional._operations.2.gamma" in told, told
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    told = refused(here / "run", model=unbuilt, **right)
    assert "call it once before Run" in told, told
    told = refused(here / "run", net=net(), **right)
    assert "not in the checkpoint: net" in told, told
    assert "names that Run does not have: model, step" in told, told
    told = refused(here / "run", model=np.zeros(3), **right)
    assert "changed: model (is a ndarray)" in told, told
    assert not right["optimizer"].built  # nothing of it was touched
    told = refused(here / "run", model=net(), optimizer=keras.optimizers.SGD())
    assert "only in the checkpoint: optimizer._variables.2" in told, told
    # None of them has spoilt it; what is told to begin anew does, under any name.
    command(*adopt, here / "anew", "--name", "net=model", "--fresh", "optimizer")
    model, fresh = net(), keras.optimizers.SGD(momentum=0.9)
    with holdfast.Run(here / "anew", net=model, optimizer=fresh) as run:
        assert (run.step, int(fresh.iterations)) == (3, 0)
    with holdfast.Run(here / "run", model=model, **right) as run:
        assert run.step == int(right["optimizer"].iterations) == 3


def case_what_is_no_checkpoint(here):
    model, _ = saved(here / "ck")
    (here / "lost").mkdir()
    (here / "lost" / "checkpoint").write_text('model_checkpoint_path: "ckpt-3"\n')
    run = here / "run"
    for source, part in (
        (here, "no checkpoint in it that is known here"),
        (here / "lost", "names none that is there"),
        (here / "ck" / "ckpt-9", "Name one: " + str(here / "ck" / "ckpt-1")),
        (here / "no" / "ckpt-9", "no such file or folder"),
        (here / "model.keras", "a file of Keras"),
    ):
        told = command("adopt", run, "--from", source, status=2)
        assert part in told, told
        assert len(told.splitlines()) == 2, told
        assert not run.exists()
    told = command("adopt", run, "--from", here / "ck", "--name", "a=b", status=2)
    assert "has no b.\nIt has: model, optimizer, step." in told, told
    assert "is not NEW=OLD" in command("adopt", run, "--from", here / "ck", "--name", "a", status=2)
    twice = ("--name", "a=model", "--name", "a=optimizer")
    assert "already" in command("adopt", run, "--from", here / "ck", *twice, status=2)
    lost = ("--name", "optimizer=model")
    assert "would be lost" in command("adopt", run, "--from", here / "ck", *lost, status=2)
    bare = tf.train.Checkpoint(model=model)
    bare.save(str(here / "bare" / "x"))
    told = command("adopt", run, "--from", here / "bare", status=2)
    assert "Say it: --step N" in told, told
    command("adopt", here / "zero", "--from", here / "bare", "--step", 0)
    with holdfast.Run(here / "zero", model=net()) as opened:
        assert opened.step == 0
    saver = tf.compat.v1.train.Saver([tf.Variable(1.0, name="v")])
    (here / "old").mkdir()
    saver.save(None, str(here / "old" / "x"))
    assert "written by tf.compat.v1's Saver" in command(
        "adopt", run, "--from", here / "old" / "x", status=1
    )
    two = tf.train.Checkpoint(a=tf.Variable(1, name="a"), step=tf.Variable(4), steps=tf.Variable(5))
    two.save(str(here / "two" / "x"))
    told = command("adopt", run, "--from", here / "two", status=2)
    assert "does not agree (step 4, steps 5)" in told, told
    command("adopt", run, "--from", here / "ck")
    told = command("adopt", run, "--from", here / "ck", status=2)
    assert "there is a run here already" in told, told
    told = command("adopt", here / "ck", "--from", here / "ck", status=2)
    assert "is there already, and was left as it is" in told, told
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))
    try:
        told = command("adopt", here / "deep" / "full", "--from", here / "ck", status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert "could not be written (File too large" in told, told
    assert not any((here / "deep").iterdir())


def case_a_damaged_one(here):
    saved(here / "ck")
    for name in ("ckpt-3.index", "ckpt-3.data-00000-of-00001"):
        file = here / "ck" / name
        whole = file.read_bytes()
        middle = len(whole) // 2
        for broken in (
            whole[:middle],
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        ):
            file.write_bytes(broken)
            told = command("adopt", here / "run", "--from", here / "ck", status=1)
            assert "cannot be read" in told, told
            assert len(told.splitlines()) == 2, told
            assert not (here / "run").exists()
        file.write_bytes(whole)


if __name__ == "__main__":
    cases = [name for name in globals() if name.startswith("case_")]
    run_all(Path(sys.argv[1]), {name: globals()[name] for name in sys.argv[2:] or cases})

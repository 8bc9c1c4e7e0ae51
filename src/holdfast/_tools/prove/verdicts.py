"""The causes, each with its sentence and its remedy. The words on the left never change."""

from __future__ import annotations

CAUSES: dict[str, tuple[str, str]] = {
    "scheduler-not-saved": (
        "The scheduler begins anew after the restart while the weights go on: it is not saved.",
        "Save scheduler.state_dict() in the checkpoint and load it before the loop.",
    ),
    "data-position-lost": (
        "After the restart the data comes from another place than the one that was reached: "
        "some samples are seen twice, others never.",
        "Save how many batches of the epoch are used and skip them, with the epoch's seed; "
        "run.batches(loader) of holdfast does both.",
    ),
    "generator-not-restored": (
        "A random generator is not where it was, and what is drawn from it differs.",
        "Save and restore the states of the generators in use (torch, numpy, random, CUDA; those "
        "of Keras layers such as Dropout, which tf.train.Checkpoint leaves out).",
    ),
    "scaler-not-saved": (
        "The gradient scaler begins with its first scale again: it is not saved.",
        "Save scaler.state_dict() in the checkpoint and load it.",
    ),
    "ema-not-saved": (
        "A moving average or another copy of the weights begins anew after the restart: it is not "
        "saved.",
        "Save the averaged or copied weights in the checkpoint and load them.",
    ),
    "off-by-one-step": (
        "After the restart one step is made twice or left out: the saved step number and the "
        "saved weights are not of the same moment.",
        "Save the number of completed steps together with the weights, and begin with that one.",
    ),
    "torn-checkpoint": (
        "The checkpoint was being written when the process died, and the half file is all that "
        "is left.",
        "Write to a temporary file, flush it to disk, and rename it over the old one.",
    ),
    "workers-reseeded": (
        "The samples are the right ones, but the loader's workers draw other random numbers for "
        "them after the restart.",
        "Seed each sample from (epoch, index), or restore the generator from which the loader "
        "draws the seeds of its workers.",
    ),
    "optimizer-state-lost": (
        "The optimizer's moments begin anew after the restart: they are not restored.",
        "Save optimizer.state_dict() in the checkpoint and load it after the model; with "
        "TensorFlow, name the optimizer in tf.train.Checkpoint.",
    ),
    "saved-in-mid-step": (
        "The checkpoint was written inside a signal handler, in the middle of a step: it mixes "
        "what was before the update with what was after it.",
        "Let the handler only note the signal, and save between two steps.",
    ),
    "weights-not-restored": (
        "The weights after the restart are those of no step of the undisturbed run.",
        "Save all of the weights at one moment, between two steps, and load all of them.",
    ),
    "buffers-not-saved": (
        "Buffers of a module begin anew after the restart.",
        "Save model.state_dict(), which has the buffers, and load it with strict=True.",
    ),
    "setting-differs": (
        "A setting of the optimizer, such as its learning rate, is another one after the restart.",
        "If it is computed from a counter, save the counter; if the restart sets it, do not.",
    ),
    "other-number-of-steps": (
        "The training ends at another step: what decides its end, such as a counter of epochs or "
        "of patience, is not as it was.",
        "Save what the loop's end depends on.",
    ),
    "progress-lost": (
        "A checkpoint is there and cannot be read, and the script begins anew without a word.",
        "Let an error in loading end the script, or fall back to an older checkpoint.",
    ),
    "state-not-saved": (
        "It begins anew after the restart: it is not saved.",
        "Save it in the checkpoint and load it.",
    ),
    "state-not-named": (
        "After the restart something begins anew that the run does not know of: this, or what it "
        "is made from.",
        "Give it to holdfast.Run as a keyword. What was given already was computed from it.",
    ),
    "resume-fails": (
        "The script cannot be started again after an interruption.",
        "Start it by hand in the folder that --keep leaves, and look at its last words.",
    ),
    "hangs": (
        "The script stopped making steps.",
        "Start it by hand in the folder that --keep leaves, and look where it waits.",
    ),
    "result-differs": (
        "The training ends the same, but a file that it leaves does not.",
        "Save what decides the file's content (such as the best value so far) in the checkpoint.",
    ),
    "reference-differs": (
        "The interrupted run does not end as the given one did: either the interruptions or "
        "other options, code or machines are the cause.",
        "Prove it without --reference: then the script is compared with itself.",
    ),
    "metric-differs": (
        "The training goes on the same, but what is logged does not.",
        "Name what the metric is made of in the state.",
    ),
    "unseeded-generator": (
        "Random numbers are drawn from a generator that was never seeded.",
        "Seed all generators at the top: torch.manual_seed(0), random.seed(0), np.random.seed(0); "
        "keras.utils.set_random_seed(0) does it for TensorFlow.",
    ),
    "time-or-pid-in-seed": (
        "The seed itself is another one in each run, as one from the clock or the process id.",
        "Take a fixed seed, or one from the command line.",
    ),
    "nondeterministic-kernels": (
        "The same weights, batch and random numbers give other gradients: a kernel that does not "
        "add up in a fixed order.",
        "torch.use_deterministic_algorithms(True), and torch.set_num_threads(1) on the CPU; "
        "tf.config.experimental.enable_op_determinism().",
    ),
    "data-order-not-fixed": (
        "Something comes in another order though no generator that is seen differs, as from a set, "
        "a directory listing, threads, or a generator made without a seed.",
        "Sort what is iterated over, and give every generator a seed.",
    ),
    "unknown": (
        "Nothing that was seen before it differs.",
        "Replay it with --only and --keep, and compare what the script prints.",
    ),
}


def words_for(cause: str) -> tuple[str, str]:
    return CAUSES[cause]

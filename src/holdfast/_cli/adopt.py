"""`holdfast adopt`: what it takes, and what it says."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast._cli.group import FOLDER
from holdfast._status import words

_NAMED = 8
_COUNT = click.IntRange(0, 2**53)  # more than any run makes, and what its records can hold


def _read_names(
    _: click.Context, __: click.Parameter, given: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    pairs = []
    for each in given:
        new, sign, old = each.partition("=")
        if not (new and sign and old):
            raise click.BadParameter(f"{each!r} is not NEW=OLD: model=net, say.")
        pairs.append((new, old))
    return tuple(pairs)


@click.command(short_help="Start a run from checkpoints of tf.train.CheckpointManager.")
@click.argument("folder", metavar="FOLDER", type=FOLDER)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    type=FOLDER,
    required=True,
    help="The manager's folder (its newest), or one checkpoint: ckpts/ckpt-7.",
)
@click.option("--step", type=_COUNT, metavar="N", help="The steps made; else it is found out.")
@click.option("--epoch", type=_COUNT, default=0, metavar="N", help="The epochs that are over.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NEW=OLD",
    callback=_read_names,
    help="Run calls it NEW, the checkpoint OLD; may be repeated. OLD `.` is the whole checkpoint.",
)
@click.option(
    "--fresh", multiple=True, metavar="NAME", help="This state begins as the script makes it."
)
def adopt(
    folder: Path,
    source: Path,
    step: int | None,
    epoch: int,
    names: tuple[tuple[str, str], ...],
    fresh: tuple[str, ...],
) -> None:
    """Start a run from checkpoints that tf.train.CheckpointManager wrote.

    FOLDER becomes a run whose first checkpoint has every variable of CHECKPOINT, to the bit. Then
    give holdfast.Run this folder, and the objects under the names that tf.train.Checkpoint had
    them: the first start lays the one over the other as TensorFlow's restore would, and refuses
    what does not fit. The files that were adopted are not changed, nor needed any more.

    The step is that of the optimizer, or of a variable `step`. Iterators of tf.data are left out:
    the data begins at the top of an epoch.

    \b
    Example:
      holdfast adopt runs/a --from ckpts
      holdfast adopt runs/a --from ckpts/ckpt-7 --epoch 3 --name model=net
      >>> with holdfast.Run("runs/a", model=model, optimizer=optimizer) as run:
    """
    from holdfast._cli.adopt_files import Adoption, adopt_files

    done = adopt_files(folder, Adoption(source, step, epoch, names, fresh))
    states = ", ".join(f"{name} ({count})" for name, count in done.states.items())
    click.echo(
        f"{words.name(folder)}: step {done.step} (by {done.step_from}), adopted from "
        f"{words.name(done.prefix)}; {words.size(done.size_bytes)}, durable."
    )
    click.echo(f"Variables of {states}. Give Run the objects under these names.")
    if done.left_out:
        more = f", and {len(done.left_out) - _NAMED} more" if len(done.left_out) > _NAMED else ""
        click.echo(
            f"Left out, for it is no variable with numbers: {', '.join(done.left_out[:_NAMED])}"
            f"{more}. An iterator of tf.data begins anew, at the top of an epoch."
        )

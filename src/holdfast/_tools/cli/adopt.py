"""`holdfast adopt`: what it takes, and what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from holdfast import _text
from holdfast._tools.cli.group import FOLDER

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


@click.command(short_help="Start a run from checkpoints that other libraries wrote.")
@click.argument("folder", metavar="FOLDER", type=FOLDER)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    type=FOLDER,
    required=True,
    help="A file, a folder, or a folder of several (its newest).",
)
@click.option("--step", type=_COUNT, metavar="N", help="The steps made; else it is found out.")
@click.option("--epoch", type=_COUNT, metavar="N", help="The epochs that are over.")
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
    epoch: int | None,
    names: tuple[tuple[str, str], ...],
    fresh: tuple[str, ...],
) -> None:
    """Start a run from a checkpoint that another library wrote.

    That is: a file of torch.save or safetensors, a .ckpt of Lightning, a folder of Hugging Face, of
    torch.distributed.checkpoint, of Orbax, or of tf.train.CheckpointManager. No code that is in it
    is ever run.

    FOLDER becomes a run whose first checkpoint has every tensor of CHECKPOINT, to the bit. Then
    give holdfast.Run this folder, and the objects under the names that are printed: the first start
    lays the one over the other, and refuses what does not fit. The files that were adopted are not
    changed, nor needed any more. The data begins at the top of an epoch.

    CHECKPOINT may also be an arena in /dev/shm, of a run whose folder was removed while it trained:
    FOLDER becomes that run, and goes on exactly there.

    \b
    Example:
      holdfast adopt runs/a --from last.ckpt
      holdfast adopt runs/a --from out/checkpoint-500 --fresh scheduler
      holdfast adopt runs/a --from net.pt --step 0 --name model=net
      >>> with holdfast.Run("runs/a", model=model, optimizer=optimizer) as run:
    """
    if sys.platform == "linux":
        from holdfast._store.memory.backing import is_arena

        if is_arena(source):
            is_plain = not names and not fresh and step is None and epoch is None
            _adopt_memory(folder, source, is_plain=is_plain)
            return
    from holdfast._tools.convert.adopt.adoption import Adoption, adopt_files

    done = adopt_files(folder, Adoption(source, step, epoch, names, fresh))
    found = done.prepared
    click.echo(
        f"{_text.name(folder)}: step {found.step} (by {found.step_from}), adopted from "
        f"{_text.name(found.source)}{f' ({found.kind})' if found.kind else ''}; "
        f"{_text.size(done.size_bytes)}, durable."
    )
    states = ", ".join(f"{name} ({count})" for name, count in found.states.items() if count)
    what = "Tensors" if found.kind else "Variables"
    click.echo(f"{what} of {states}. Give Run the objects under these names.")
    values = [name for name, count in found.states.items() if not count]
    if values:
        click.echo(f"Values without tensors: {_some(values)}.")
    for note in found.notes:
        click.echo(note)
    if found.left_out and found.kind:
        click.echo(f"Left out: {_some(found.left_out)}.")
    elif found.left_out:
        click.echo(
            f"Left out, for it is no variable with numbers: {_some(found.left_out)}. "
            "An iterator of tf.data begins anew, at the top of an epoch."
        )


def _adopt_memory(folder: Path, source: Path, *, is_plain: bool) -> None:
    from holdfast._tools.convert.adopt.from_memory import adopt_memory

    if not is_plain:
        raise click.UsageError("A state in memory is taken as it is, without further options.")
    step = adopt_memory(folder, source)
    click.echo(f"{_text.name(folder)}: step {step}, in the memory of this machine.")
    click.echo("Start the training with this folder: it goes on there and makes it durable.")


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more

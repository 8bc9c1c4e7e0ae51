"""The commands that use the checkpoints of a run: `export`, `clean`, `adopt`, `mirror`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from holdfast import _text
from holdfast._store.memory.backing import is_arena
from holdfast._tools import mirror as by_hand
from holdfast._tools.clean import Litter, LitterFound, find_litter, remove
from holdfast._tools.cli.group import AS_JSON, FOLDER, RUN, complete_runs, print_json
from holdfast._tools.cli.show import Screen, some
from holdfast._tools.convert.export import export as write_export
from holdfast._tools.convert.writers import WRITERS, ExportRequest

_COUNT = click.IntRange(0, 2**53)  # the most that the records can hold


@click.command()
@RUN
@click.argument("out", metavar="OUT", type=FOLDER)
@click.option("--step", type=int, metavar="N", help="The checkpoint of step N, not the newest.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this state; may be repeated.")
@click.option("--strip", is_flag=True, help="With one --only: 0.weight, and not model.0.weight.")
@click.option("--force", is_flag=True, help="Replace OUT if there is one.")
@click.option(
    "--to", type=click.Choice(list(WRITERS)), help="The format; else the ending of OUT says it."
)
@click.option(
    "--config",
    metavar="PATH",
    type=FOLDER,
    help="With --to huggingface: config.json, or a folder that has it.",
)
def export(run: Path, out: Path, only: tuple[str, ...], to: str | None, **options: Any) -> None:
    """Write a checkpoint for other programs, as a file or a folder.

    Takes the newest whole checkpoint, as the run itself would when started again, and checks every
    byte before the first is written. OUT appears when it is whole, or not at all. The run may be
    training meanwhile.

    OUT.safetensors needs no framework: tensors under plain names (model.0.weight), all else as JSON
    in the metadata. OUT.pt is for torch.load(…, weights_only=True): a dict with the state of each
    object, on the CPU. A dtype that the format lacks is stored as raw bytes.

    \b
    With --to OUT is a folder:
      tensorflow   for tf.train.Checkpoint, by tf.train.latest_checkpoint(OUT)
      huggingface  for from_pretrained, and the files that the Trainer needs
      dcp          for torch.distributed.checkpoint, on any number of ranks
    and with --to safetensors or --to torch a file of that kind.

    Of several ranks it has the shared state, with sharded tensors made whole. Of the state that
    each rank has for itself, such as a generator, it has that of rank 0.

    \b
    Example:
      holdfast export runs/a all.pt
      holdfast export runs/a model.safetensors --only model --strip
      >>> model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
      holdfast export runs/b ckpts --to tensorflow
      holdfast export runs/a out --to huggingface --config gpt2/config.json
    """
    request = ExportRequest(out, only=tuple(dict.fromkeys(only)), to=to, **options)
    done = write_export(run, request)
    chosen = done.chosen
    for line in chosen.passed_over:
        click.echo(f"{_text.name(line)} The previous one is taken.", err=True)
    click.echo(
        f"{_text.name(out)}: step {chosen.step} (attempt {chosen.attempt}) of {_text.name(run)}, "
        f"{_text.count(done.tensors, 'tensor')}, {_text.size(done.size_bytes)}; every checksum was "
        "verified."
    )
    if done.left_out:
        whose = "tf.train.Checkpoint" if to == "tensorflow" else "such a folder"
        click.echo(f"Left out, for {whose} has no place for it: {some(done.left_out)}.")
    if (ranks := chosen.loaded.world) > 1:
        click.echo(f"Put together from {ranks} ranks; what each has of its own is rank 0's.")
    if done.newer_in_memory is not None:
        click.echo(
            f"Step {done.newer_in_memory} is newer, and only in memory so far. If the run trains: "
            f"{_text.command('save', run)} --wait, and export again."
        )


@click.command()
@click.argument(
    "folders", metavar="[FOLDER]...", nargs=-1, type=FOLDER, shell_complete=complete_runs
)
@click.option("--yes", is_flag=True, help="Remove what is listed; without it, only look.")
@click.option(
    "--all-memory", is_flag=True, help="Also memory of runs that are not in these folders."
)
@click.option(
    "--drop-memory", is_flag=True, help="Also memory that is the newest state of a run. It is lost."
)
@AS_JSON
def clean(
    folders: tuple[Path, ...], yes: bool, all_memory: bool, drop_memory: bool, as_json: bool
) -> int:
    """Show what dead runs have left behind, and remove it with --yes.

    That is: snapshots in shared memory that are on disk too, checkpoints that were set aside since
    they are damaged, and files whose write or removal was interrupted. Good checkpoints, live runs,
    and what may be the newest state of a run are never touched.

    FOLDER is a run folder, or one with runs in it (up to three levels down). Without it: the
    current folder, and all your shared memory of holdfast on this machine.

    \b
    Example:
      holdfast clean runs
      holdfast clean runs --yes
    """
    found = find_litter(folders, all_memory=all_memory, drop_memory=drop_memory)
    if yes:
        found.items = remove(found.items)
    if as_json:
        size_bytes = sum(item.size_bytes for item in found.items if item.goes)
        print_json({**asdict(found), "size_bytes": size_bytes})
    else:
        again = " ".join(["clean", *(["--all-memory"] if all_memory else [])])
        again += " --drop-memory" if drop_memory else ""
        _show_litter(Screen(), found, yes, _text.command(again, *folders))
    return int(yes and any(item.goes and not item.is_removed for item in found.items))


def _show_litter(screen: Screen, found: LitterFound, yes: bool, command: str) -> None:
    going = [item for item in found.items if item.goes]
    staying = [item for item in found.items if not item.goes]
    if going:
        screen.write("Removed:" if yes else "Can be removed:", style="bold")
        _list(screen, going, yes)
    if staying:
        screen.write("Left alone:", style="bold")
        _list(screen, staying, yes)
    if found.busy:
        many = len(found.busy) > 1
        what = f"{len(found.busy)} of them are" if many else f"{_text.name(found.busy[0])} is"
        screen.write(f"{_text.count(found.runs, 'run')}; {what} live: untouched.")
    if yes and going:
        screen.write(f"{_total([item for item in going if item.is_removed])} removed.")
        if kept := [item for item in going if not item.is_removed]:
            screen.write(f"{_total(kept)} could not be removed: see above.", style="bold red")
    elif going:
        screen.write(f"{_total(going)}. Nothing was removed yet. To do it: {command} --yes")
    else:
        screen.write("There is nothing else to clean." if staying else "There is nothing to clean.")


def _list(screen: Screen, items: Sequence[Litter], yes: bool) -> None:
    rows: list[tuple[str, Text]] = []
    for item in items:
        name = Text(_text.name(item.path))
        if yes and item.goes and not item.is_removed:
            name.append(" COULD NOT BE REMOVED", style="bold red")
        rows += [(f"  {_text.size(item.size_bytes)}", name), ("", Text(item.why, style="dim"))]
    screen.grid((">=", ""), rows)


def _total(items: Sequence[Litter]) -> str:
    size_bytes = sum(item.size_bytes for item in items)
    return f"{_text.count(len(items), 'thing')}, {_text.size(size_bytes)}"


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


@click.command()
@click.argument("folder", metavar="FOLDER", type=FOLDER)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    type=FOLDER,
    required=True,
    help="A file, a folder, or a folder of several (its newest).",
)
@click.option(
    "--step",
    type=_COUNT,
    metavar="N",
    help="The steps that were made; without it, read from CHECKPOINT.",
)
@click.option("--epoch", type=_COUNT, metavar="N", help="The epochs that are complete.")
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
def adopt(folder: Path, source: Path, **options: Any) -> None:
    """Start a run from a checkpoint that another library wrote.

    That is: a file of torch.save or safetensors, a .ckpt of Lightning, a folder of Hugging Face, of
    torch.distributed.checkpoint, of Orbax, or of tf.train.CheckpointManager. No code that is in it
    is ever run.

    FOLDER becomes a run whose first checkpoint has every tensor of CHECKPOINT, to the bit. Then
    give holdfast.Run this folder, and the objects under the names that are printed: the first start
    loads the tensors into the objects, and refuses what does not fit. The adopted files are not
    changed, and not needed any more. The data begins at the start of an epoch.

    CHECKPOINT may also be an arena in /dev/shm, of a run whose folder was removed while it trained:
    FOLDER becomes that run, and goes on exactly there.

    \b
    Example:
      holdfast adopt runs/a --from last.ckpt
      holdfast adopt runs/a --from out/checkpoint-500 --fresh scheduler
      holdfast adopt runs/a --from net.pt --step 0 --name model=net
      >>> with holdfast.Run("runs/a", model=model, optimizer=optimizer) as run:
    """
    if is_arena(source):
        _adopt_memory(folder, source, options)
        return
    from holdfast._tools.convert.adoption import adopt_files
    from holdfast._tools.convert.foreign import Adoption

    found = adopt_files(folder, Adoption(source, **options))
    click.echo(
        f"{_text.name(folder)}: step {found.step} (by {found.step_from}), adopted from "
        f"{_text.name(found.source)}{f' ({found.kind})' if found.kind else ''}; "
        f"{_text.size(found.size_bytes)}, durable."
    )
    states = ", ".join(f"{name} ({count})" for name, count in found.states.items() if count)
    what = "Tensors" if found.kind else "Variables"
    click.echo(f"{what} of {states}. Give Run the objects under these names.")
    values = [name for name, count in found.states.items() if not count]
    if values:
        click.echo(f"Values without tensors: {some(values)}.")
    for note in found.notes:
        click.echo(note)
    if found.left_out and found.kind:
        click.echo(f"Left out: {some(found.left_out)}.")
    elif found.left_out:
        click.echo(
            f"Left out, for it is no variable with numbers: {some(found.left_out)}. "
            "An iterator of tf.data starts over, at the top of an epoch."
        )


def _adopt_memory(folder: Path, source: Path, options: dict[str, Any]) -> None:
    from holdfast._tools.convert.adoption import adopt_memory

    if any(value not in (None, ()) for value in options.values()):
        raise click.UsageError("A state in memory is taken as it is, without further options.")
    step = adopt_memory(folder, source)
    click.echo(f"{_text.name(folder)}: step {step}, in the memory of this machine.")
    click.echo("Start the training with this folder: it goes on there and makes it durable.")


@click.command()
@RUN
@click.option("--push", is_flag=True, help="Copy the newest checkpoint there now.")
@click.option(
    "--fetch", is_flag=True, help="Copy the newest whole checkpoint to RUN, which may be new."
)
@click.option("--step", type=int, metavar="N", help="With --fetch: the checkpoint of step N.")
@click.option("--at", metavar="ADDRESS", help="The mirror, where RUN does not know it.")
@AS_JSON
def mirror(
    run: Path, push: bool, fetch: bool, step: int | None, at: str | None, as_json: bool
) -> None:
    """Look at the mirror of a run: what Settings(mirror=…) has copied to a store or a folder.

    Without an option it lists the checkpoints there. A run copies by itself, and an empty folder
    gets the newest by itself when it is started; --push and --fetch do it now. Every fetched byte
    is checked before it is used.

    \b
    Example:
      holdfast mirror runs/a
      holdfast mirror runs/a --push --at s3://bucket/a
      holdfast mirror runs/new --fetch --at s3://bucket/a
    """
    if push and fetch:
        raise click.UsageError("--push and --fetch are two things: give one of them.")
    if step is not None and not fetch:
        raise click.UsageError("--step is for --fetch.")
    address = by_hand.address_of(run, at)
    if push:
        waiting = f"{_text.name(run)}: its own copying is under way; waiting for it."
        found = by_hand.push(
            run,
            address,
            lambda: click.echo(waiting, err=True),
            lambda text: click.echo(_text.name(text), err=True),
        )
        if as_json:
            print_json(found)
            return
        newest = found["checkpoints"][-1]["step"]
        click.echo(f"{_text.name(run)}: step {newest} is in {_text.name(address)}.")
    elif fetch:
        done = by_hand.fetch(
            run,
            address,
            step,
            lambda _, text: click.echo(f"{_text.name(text)} It is not used.", err=True),
        )
        if as_json:
            print_json(asdict(done))
            return
        click.echo(
            f"{_text.name(run)}: step {done.step} (attempt {done.attempt}) is here, "
            f"{_text.size(done.size_bytes)}, every byte checked. A start goes on from there."
        )
    else:
        held = by_hand.list_mirror(run, address)
        if as_json:
            print_json(asdict(held))
            return
        _show_mirror(Screen(), held)


def _show_mirror(screen: Screen, held: by_hand.MirrorList) -> None:
    rows = [
        (
            f"{each.step} (end of epoch)" if each.name.endswith("-turn") else str(each.step),
            _text.duration(each.age_seconds),
            "damaged index" if each.size_bytes is None else _text.size(each.size_bytes),
            str(each.attempt),
            "yes" if each.is_here else "no",
        )
        for each in held.checkpoints
    ]
    if not rows:
        screen.write(f"{_text.name(held.address)}: no checkpoints yet.")
    else:
        screen.table([">=step", ">=age", ">=size", ">=attempt", "here too"], rows)
        count = _text.count(len(rows), "checkpoint")
        screen.write(f"{count} in {_text.name(held.address)}", style="dim")
    if held.damaged:
        screen.write(f"{len(held.damaged)} with a damaged manifest, never fetched", style="yellow")

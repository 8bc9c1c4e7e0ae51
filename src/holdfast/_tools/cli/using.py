"""The commands that use what a run has left, and the one that sets up the shell."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from holdfast import _text
from holdfast._tools.cli.group import AS_JSON, FOLDER, RUN, complete_runs, print_json

_NAMED = 8
# As in `_tools/convert/export/export.py`, which only that command imports.
_FORMATS = ("safetensors", "torch", "dcp", "huggingface", "tensorflow")
_SHELLS = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command(short_help="Write a checkpoint for other programs, in their formats.")
@RUN
@click.argument("out", metavar="OUT", type=FOLDER)
@click.option("--step", type=int, metavar="N", help="That of step N, not the newest.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this state; may be repeated.")
@click.option("--strip", is_flag=True, help="With one --only: 0.weight, and not model.0.weight.")
@click.option("--force", is_flag=True, help="Replace OUT if there is one.")
@click.option(
    "--to", type=click.Choice(_FORMATS), help="The format; else the ending of OUT says it."
)
@click.option(
    "--config",
    metavar="PATH",
    type=FOLDER,
    help="With --to huggingface: config.json, or a folder that has it.",
)
def export(
    run: Path,
    out: Path,
    step: int | None,
    only: tuple[str, ...],
    strip: bool,
    force: bool,
    to: str | None,
    config: Path | None,
) -> None:
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
      huggingface  for from_pretrained; beside it what the Trainer needs
      dcp          for torch.distributed.checkpoint, on any number of ranks
    and with --to safetensors or --to torch a file of that kind.

    Of several ranks it has all that they share, sharded tensors made whole; where each has its own
    (a generator, say), it is that of rank 0.

    \b
    Example:
      holdfast export runs/a all.pt
      holdfast export runs/a model.safetensors --only model --strip
      >>> model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
      holdfast export runs/b ckpts --to tensorflow
      holdfast export runs/a out --to huggingface --config gpt2/config.json
    """
    from holdfast._tools.convert.export.export import Wanted
    from holdfast._tools.convert.export.export import export as write_export

    wanted = Wanted(out, step, tuple(dict.fromkeys(only)), strip, force, to, config)
    done = write_export(run, wanted)
    for line in done.passed_over:
        click.echo(f"{_text.name(line)} The one before it is taken.", err=True)
    noun = "tensor" if done.tensors == 1 else "tensors"
    click.echo(
        f"{_text.name(out)}: step {done.step} (attempt {done.attempt}) of {_text.name(run)}, "
        f"{done.tensors} {noun}, {_text.size(done.size_bytes)}; every checksum was verified."
    )
    if done.left_out:
        named = ", ".join(done.left_out[:_NAMED])
        more = f", and {len(done.left_out) - _NAMED} more" if len(done.left_out) > _NAMED else ""
        whose = "tf.train.Checkpoint" if to == "tensorflow" else "such a folder"
        click.echo(f"Left out, for {whose} has no place for it: {named}{more}.")
    if done.ranks > 1:
        click.echo(f"Put together from {done.ranks} ranks; what each has of its own is rank 0's.")
    if done.newer_in_memory is not None:
        click.echo(
            f"Step {done.newer_in_memory} is newer, and only in memory so far. If the run trains: "
            f"{_text.command('save', run)} --wait, and export again."
        )


@click.command(short_help="Show what dead runs have left behind; --yes removes it.")
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
    they are damaged, and what was cut short while it was written or removed. Good checkpoints, live
    runs, and whatever may be the newest state of a run are never touched.

    FOLDER is a run folder, or one with runs in it (up to three levels down). Without it: the
    current folder, and all shared memory that holdfast has of you on this machine.

    \b
    Example:
      holdfast clean runs
      holdfast clean runs --yes
    """
    from holdfast._tools.clean.folders import remove
    from holdfast._tools.cli.clean import find_litter, show_litter

    found = find_litter(folders, all_memory=all_memory, drop_memory=drop_memory)
    if yes:
        found.items = remove(found.items)
    if as_json:
        size_bytes = sum(item.size_bytes for item in found.items if item.goes)
        print_json({**asdict(found), "size_bytes": size_bytes})
    else:
        again = " ".join(["clean", *(["--all-memory"] if all_memory else [])])
        again += " --drop-memory" if drop_memory else ""
        show_litter(found, yes, _text.command(again, *folders))
    return int(yes and any(item.goes and not item.is_removed for item in found.items))


@click.command(short_help="Print the script for completion with the Tab key.")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which the Tab key completes commands, options and run folders.

    \b
    To have it in every shell from now on, put one line into its start-up file:
      ~/.bashrc                     eval "$(holdfast completion bash)"
      ~/.zshrc (after compinit)     eval "$(holdfast completion zsh)"
      ~/.config/fish/config.fish    holdfast completion fish | source

    \b
    Example:
      holdfast completion bash
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    root = context.find_root()
    click.echo(made(root.command, {}, "holdfast", "_HOLDFAST_COMPLETE").source())

"""The command that looks at a mirror, copies to it, and fetches from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from holdfast import _text
from holdfast._tools.cli.group import AS_JSON, RUN, print_json


@click.command(short_help="See what the mirror of a run holds; copy to it, or fetch from it.")
@RUN
@click.option("--push", is_flag=True, help="Copy the newest checkpoint there now.")
@click.option("--fetch", is_flag=True, help="Have the newest whole one in RUN, which may be new.")
@click.option("--step", type=int, metavar="N", help="With --fetch: that of step N.")
@click.option("--at", metavar="ADDRESS", help="The mirror, where RUN does not know it.")
@AS_JSON
def mirror(
    run: Path, push: bool, fetch: bool, step: int | None, at: str | None, as_json: bool
) -> None:
    """Look at the mirror of a run: what Settings(mirror=…) has copied to a store or a folder.

    Without an option it lists the checkpoints there. A run copies by itself, and an empty folder
    gets the newest by itself when it is started; --push and --fetch are for what a person wants
    now. All that is fetched is checked, byte by byte, before it counts.

    \b
    Example:
      holdfast mirror runs/a
      holdfast mirror runs/a --push --at s3://bucket/a
      holdfast mirror runs/new --fetch --at s3://bucket/a
    """
    from holdfast._tools import mirror as by_hand

    if push and fetch:
        raise click.UsageError("--push and --fetch are two things: give one of them.")
    if step is not None and not fetch:
        raise click.UsageError("--step is for --fetch.")
    address = by_hand.address_of(run, at)
    if push:
        told: list[str] = []

        def wait() -> None:
            if not told:
                told.append("")
                text = "its own copying is under way; waiting for it."
                click.echo(f"{_text.name(run)}: {text}", err=True)

        def tell_damage(text: str) -> None:
            click.echo(_text.name(text), err=True)

        found = by_hand.push(run, address, wait, tell_damage)
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
            lambda *_: None,
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
        from holdfast._tools.cli.show import Screen

        show_mirror(Screen(), held)


def show_mirror(screen: object, held: object) -> None:
    """The checkpoints of a mirror, newest last."""
    from holdfast._tools.cli.show import Screen
    from holdfast._tools.mirror import MirrorList

    assert isinstance(screen, Screen)
    assert isinstance(held, MirrorList)
    if not held.checkpoints:
        screen.write(f"{_text.name(held.address)}: no checkpoints yet.")
    else:
        table = screen.columns()
        for label in ("step", "age", "size", "attempt"):
            table.add_column(label, justify="right", no_wrap=True)
        table.add_column("here too")
        for each in held.checkpoints:
            size = "damaged index" if each.size_bytes is None else _text.size(each.size_bytes)
            table.add_row(
                f"{each.step} (end of epoch)" if each.name.endswith("-turn") else str(each.step),
                _text.duration(each.age_seconds),
                size,
                str(each.attempt),
                "yes" if each.is_here else "no",
            )
        screen.table(table)
        count = len(held.checkpoints)
        noun = "checkpoint" if count == 1 else "checkpoints"
        screen.write(f"{count} {noun} in {_text.name(held.address)}", style="dim")
    if held.damaged:
        screen.write(f"{len(held.damaged)} with a damaged manifest, never fetched", style="yellow")

"""Bash as lint reads it."""

from __future__ import annotations

import pytest

from holdfast._tools.lint.launch import find_launch
from holdfast._tools.lint.shell import (
    Command,
    NotUnderstood,
    find_comments,
    find_values,
    parse_commands,
)


def texts(script: str) -> list[str]:
    return [" ".join(word.text for word in each.words) for each in parse_commands(script)]


def one(script: str, name: str) -> Command:
    (found,) = [each for each in parse_commands(script) if each.text == name]
    return found


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a b; c && d || e | f & g", ["a b", "c", "d", "e", "f", "g"]),
        ("a \\\n  --b # c\nd", ["a --b", "d"]),
        ('a \'b; c\' "d & $(e "f")" `g;h`', ['a \'b; c\' "d & $(e "f")" `g;h`']),
        ("cat <<EOF > x\npython y\nit's\nEOF\na", ["cat", "a"]),
        ("cat <<-'EOF'\n\tpython y\n\tEOF\na", ["cat", "a"]),
        ("a 2>&1 >out <in b", ["a b"]),
        ("if a; then b; elif c; then d; else e; fi", ["a", "b", "c", "d", "e"]),
        ("for x in 1 2; do a $x; done", ["a $x"]),
        ("for ((i=0;i<3;i++)); do a; done", ["a"]),
        ("while read x; do a; done < f", ["read x", "a"]),
        ("case $x in a|b) c;; (d) e ;; esac; f", ["c", "e", "f"]),
        ("f() { a; }; function g { b; }\nfunction h()\n{\n c\n}", ["a", "b", "c"]),
        ("(a; b) | c", ["a", "b", "c"]),
        ("x=1 y=(a 'b c') z=$((1 << 2)) a", ["a"]),
        ("[[ a && b > c ]] && d", ["[[ a b ]]", "d"]),
        ("diff <(a) <(b; c)", ["diff <(a) <(b; c)"]),
        ("echo ${x#y} ${x:-'}'} $#", ["echo ${x#y} ${x:-'}'} $#"]),
        ("a ||\n  b", ["a", "b"]),
        ("", []),
    ],
)
def test_commands_are_found(script, expected):
    assert texts(script) == expected


@pytest.mark.parametrize(
    "script", ["echo 'a", 'echo "a', "echo $(a", "if a; then b", "cat <<X\na", "a" + "$(" * 9999]
)
def test_what_is_cut_short_is_not_understood(script):
    with pytest.raises(NotUnderstood):
        parse_commands(script)


def test_an_operator_behind_a_compound_is_for_all_of_it():
    assert one("for i in 1; do a; done &", "a").is_background
    assert one("{ a; b; } | c", "a").is_piped
    assert one("a && b &", "a").is_background
    assert not one("a; b &", "a").is_background
    assert not one("a | b", "b").is_piped


def test_a_command_knows_what_it_stands_in():
    assert one("f() { a; }", "a").function == "f"
    assert one("if x; then a; fi", "a").is_conditional
    assert one("x || a", "a").is_conditional
    assert not one("{ a; }", "a").is_conditional
    assert one("time a", "a").is_timed


def test_a_comment_in_a_here_document_is_none():
    assert find_comments("# a\ncat <<E\n# b\nE\nx # c\n") == [0, 20]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('C="python a.py"; $C', ["python", "a.py"]),
        ('C="python a.py"; "$C"', ["python a.py"]),
        ('C="python $X"; $C', ["python", None]),
        ("A=(python 'a b'); A+=(-x); \"${A[@]}\"", ["python", "a b", "-x"]),
        ("P=python; $P a.py", ["python", "a.py"]),
        ("P=python; P=perl; $P a.py", [None, "a.py"]),
        ("P=$(which python); $P a.py", [None, "a.py"]),
        ("read P; $P a.py", [None, "a.py"]),
        ("D=/x; a $D/b \"${D}c\" '$D'", ["a", "/x/b", "/xc", "$D"]),
    ],
)
def test_variables_stand_for_what_the_script_says(script, expected):
    commands = parse_commands(script)
    found = find_values(commands).arguments(commands[-1].words)
    assert [each.value for each in found] == expected


@pytest.mark.parametrize(
    ("command", "kind", "is_step", "swallows"),
    [
        ("python train.py", "python", False, False),
        ("srun python train.py", "python", True, False),
        ("srun -n 4 -lu --mpi pmix --gpus-per-task=1 python train.py", "python", True, False),
        ("srun $OPTIONS python train.py", "python", True, False),
        ("srun env -u A B=1 nice -n 5 nohup python train.py", "python", True, False),
        ("srun numactl -N 0 taskset -c 0-3 python train.py", "python", True, False),
        ("srun poetry run python train.py", "python", True, False),
        ("srun timeout -k 5 1h python train.py", "python", True, True),
        ("srun /usr/bin/time -f %e python train.py", "python", True, True),
        ("srun bash -c 'python train.py'", "python", True, False),
        ("srun bash -lc 'exec python train.py; true'", "python", True, False),
        ("srun bash -c 'python train.py; true'", "python", True, True),
        ("srun bash -c 'time python train.py'", "python", True, True),
        ("srun bash -c 'trap \"kill -USR2 \\$p\" USR2; python train.py & p=$!; wait'", "other",
         True, False),
        ("srun bash -c 'exec \"$@\"' _ torchrun train.py", "torchrun", True, False),
        ("srun holdfast run -- bash -c 'python train.py; true'", "python", True, False),
        ("srun python -m holdfast run -- torchrun train.py", "torchrun", True, False),
        ("srun python -P -m holdfast run -- torchrun train.py", "torchrun", True, False),
        ("srun apptainer exec --nv -B /a:/b image.sif python train.py", "python", True, False),
        ("srun python -m torch.distributed.run train.py", "torchrun", True, False),
        ("srun accelerate launch train.py", "accelerate", True, False),
        ("srun $CMD", "other", True, False),
        ("srun --multi-prog tasks.conf", "other", True, False),
    ],
)  # fmt: skip
def test_it_is_seen_what_a_command_starts(command, kind, is_step, swallows):
    (parsed,) = parse_commands(command)
    words = find_values([parsed]).arguments(parsed.words)
    found = find_launch(parsed, words, lambda _: None)
    assert found is not None
    assert (found.kind, found.is_step, found.swallow is not None) == (kind, is_step, swallows)

"""The script that `holdfast submit` writes: its text, and its last lines run by a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._environment.slurm.job import says_where_to_meet, starts_torchrun
from holdfast._environment.slurm.options import batch_options
from holdfast._errors import SettingsError
from holdfast._tools.submit import LEAD_SECONDS, Script, job_name, write_script

BASH = shutil.which("bash")
PYTHON = "/opt/env/bin/python"
TRAIN = ("python", "train.py", "--lr", "3e-4")
TORCHRUN = ("torchrun", "--nproc-per-node=4", "train.py")


def _write(
    *words: str, command: tuple[str, ...] = TRAIN, lead_seconds: int | None = None
) -> Script:
    script = write_script(words, command, python=PYTHON, lead_seconds=lead_seconds)
    if BASH is not None:
        checked = subprocess.run([BASH, "-n"], input=script.text, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr + script.text
    return script


def test_what_makes_a_job_come_back_is_added():
    script = _write("--time=8:00:00")
    assert batch_options(script.text) == script.options
    assert script.options == {
        "time": "8:00:00",
        "job-name": "train",
        "output": "logs/%x-%j.out",
        "open-mode": "append",
        "requeue": "",
        "signal": f"USR2@{LEAD_SECONDS}",
    }
    assert script.notes == ()


def test_the_persons_own_options_come_first_and_hold():
    words = [
        "-t",
        "60",
        "-Jmine",
        "-o",
        "x/%j.txt",
        "--signal=USR1@300",
        "--requeue",
        "--nice",
        "-5",
    ]
    script = _write(*words, "--open-mode=append", "-N", "2", "--exclusive")
    assert script.text.splitlines()[:11] == [
        "#!/bin/bash",
        "#SBATCH -t 60",
        "#SBATCH -Jmine",
        "#SBATCH -o x/%j.txt",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --requeue",
        "#SBATCH --nice -5",
        "#SBATCH --open-mode=append",
        "#SBATCH -N 2",
        "#SBATCH --exclusive",
        "",
    ]
    assert script.options["job-name"] == "mine"


def test_each_task_is_led_and_guarded_and_no_rank_ends_the_others():
    (start,) = [part for part in _write().text.split("\n\n") if "\nsrun " in part]
    assert start.endswith(
        "srun --kill-on-bad-exit=0 --wait=0 \\\n"
        """    bash -c 'trap "" USR1 USR2; exec "$@"' _ \\\n"""
        f"    {PYTHON} -P -m holdfast run -- \\\n"
        "    python train.py --lr 3e-4\n"
        "status=$?"
    )


def test_the_log_of_an_array_has_the_numbers_of_its_tasks():
    assert _write("--array=0-9").options["output"] == "logs/%x-%A_%a.out"
    assert _write("-a", "0-9%2").options["output"] == "logs/%x-%A_%a.out"


@pytest.mark.parametrize(
    ("limit", "lead"),
    [("1", 15), ("2", 45), ("4:30", 120), ("60", 120), ("1-0", 120), ("UNLIMITED", 120)],
)
def test_the_lead_fits_into_the_time_limit(limit, lead):
    script = _write(f"--time={limit}")
    assert script.options["signal"] == f"USR2@{lead}"
    assert len(script.notes) == (lead < 120)


def test_a_lead_that_is_wished_for_is_taken():
    script = _write("--time=60", lead_seconds=300)
    assert script.options["signal"] == "USR2@300"
    assert script.notes == ()


@pytest.mark.parametrize(
    ("words", "lead", "note"),
    [
        (["--time=2"], 100, "the warning can come before the training begins"),
        (["--time=2", "--signal=USR2@100"], None, "the warning can come before the training"),
        (["--signal=B:USR2@60"], None, "warns the script's shell alone"),
        (["--signal=XCPU@60"], None, "holdfast stops at USR1, USR2, TERM or INT"),
        (["--no-requeue"], None, "does not come back"),
        (["--open-mode=truncate"], None, "erases the log of the previous one"),
        (["--no-kill"], None, "when a node fails"),
    ],
)
def test_options_that_defeat_it_are_kept_and_told(words, lead, note):
    script = _write(*words, lead_seconds=lead)
    (told,) = script.notes
    assert note in told
    assert all(f"#SBATCH {word}" in script.text.splitlines() for word in words)


def test_no_requeue_is_not_answered_with_requeue():
    assert "requeue" not in _write("--no-requeue").options


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (("docker", "run", "image", "python"), "no part of the job"),
        (("srun", "python", "train.py"), "with srun already"),
    ],
)
def test_commands_that_defeat_it_are_told(command, note):
    (told,) = _write(command=command).notes
    assert note in told


@pytest.mark.parametrize(
    ("words", "command", "error"),
    [
        (["python", "train.py"], (), "'python' is not an option of sbatch"),
        (["--time=10", "train.py"], TRAIN, "'train.py' is not an option of sbatch"),
        (["-N", "1", ":", "-N", "2"], TRAIN, "several different parts"),
        (["--wrap=python train.py"], TRAIN, "writes the script itself"),
        (["--comment=a\nrm -rf x"], TRAIN, "a line cannot hold this"),
        ([], (), "There is no command"),
    ],
)
def test_what_cannot_be_submitted_is_two_sentences(words, command, error):
    with pytest.raises(SettingsError) as caught:
        write_script(words, command, python=PYTHON)
    first, second = str(caught.value).split("\n")[-2:]
    assert error in str(caught.value)
    assert first
    assert second


def test_a_lead_and_a_signal_are_one_too_many():
    with pytest.raises(SettingsError, match="--lead and --signal"):
        write_script(["--signal=USR2@60"], TRAIN, python=PYTHON, lead_seconds=60)


def test_torchrun_is_one_task_for_each_node_and_its_launchers_meet():
    script = _write("--nodes=2", "--cpus-per-task=8", command=TORCHRUN)
    assert script.options["ntasks-per-node"] == "1"
    assert script.notes == ()
    assert "export PET_STANDALONE=1" in script.text
    assert "PET_MASTER_ADDR=$(scontrol show hostnames" in script.text
    assert 'export PET_NODE_RANK="$SLURM_NODEID"; exec "$@"' in script.text
    assert "    torchrun --nproc-per-node=4 train.py\n" in script.text
    assert 'SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in script.text


def test_a_meeting_place_of_the_persons_own_is_left_alone():
    command = ("torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:1234", "train.py")
    assert "PET_" not in _write("-c8", command=command).text


def test_several_tasks_that_each_start_torchrun_are_told():
    notes = _write("--ntasks-per-node=4", command=TORCHRUN).notes
    assert ["--ntasks-per-node=1" in note for note in notes] == [True, False]
    assert "--cpus-per-task" in notes[1]


def test_tasks_get_the_environment_of_a_script_that_was_given_little():
    assert "unset SLURM_EXPORT_ENV" in _write("--export=NONE").text
    for words in ([], ["--export=ALL"], ["--export=ALL,A=1"]):
        assert "SLURM_EXPORT_ENV" not in _write(*words).text


def test_in_a_container_that_srun_starts_the_leader_is_the_images():
    assert "    holdfast run -- \\\n" in _write("--container-image=x.sqsh").text
    inside = ("apptainer", "exec", "image.sif", "python", "train.py")
    script = _write(command=inside)
    assert f"    {PYTHON} -P -m holdfast run -- \\\n    apptainer exec" in script.text
    assert script.options["job-name"] == "train"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (TRAIN, "train"),
        (("python", "-u", "src/my run.py"), "my-run"),
        (("python", "-m", "a.b.c"), "c"),
        (("python", "-m", "torch.distributed.run", "go.py"), "go"),
        (("./start", "x"), "start"),
        (("!!",), "job"),
    ],
)
def test_the_job_has_the_name_of_what_it_runs(command, name):
    assert job_name(command) == name


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("torchrun", "a.py"), True),
        (("/opt/bin/torchrun", "a.py"), True),
        (("python", "-m", "torch.distributed.launch", "a.py"), True),
        (("bash", "-c", "cd x && torchrun a.py"), True),
        (("python", "a.py", "--launcher=my-torchrun"), False),
        (("python", "torchrun.py"), False),
    ],
)
def test_torchrun_is_known_wherever_it_stands(command, expected):
    assert starts_torchrun(command) is expected


def test_the_number_of_nodes_is_no_meeting_place():
    assert not says_where_to_meet(("torchrun", "--nnodes=2", "a.py"))
    assert says_where_to_meet(("torchrun", "--master_addr", "n1", "a.py"))


_TEXT = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\x85\u2028\u2029"),
    min_size=1,
    max_size=20,
)


@given(value=_TEXT)
def test_any_value_of_an_option_comes_back_as_it_was(value):
    script = write_script([f"--comment={value}"], TRAIN, python=PYTHON)
    assert script.options["comment"] == value


@pytest.mark.skipif(BASH is None, reason="needs bash")
@given(words=st.lists(_TEXT, min_size=1, max_size=4))
def test_any_word_of_the_command_reaches_it_as_it_was(words):
    text = write_script([], ["printf", "%s\\n", *words], python=PYTHON).text
    start = text[text.index("    bash -c") : text.index("status=$?")]
    # The guard is run for real, without a leader.
    start = start.replace(f"{PYTHON} -P -m holdfast run -- \\\n", "")
    said = subprocess.run(["bash", "-c", start], capture_output=True, check=True).stdout
    assert said.decode() == "".join(f"{word}\n" for word in words)


# What the controller says, the wish that the keeper has left, and whether it is fulfilled.
_RUNNING = "JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1"
_ENDING = "JobState=COMPLETING Reason=None Requeue=1 Restarts=0 BatchFlag=1"
_LIMIT = "JobState=COMPLETING Reason=TimeLimit Requeue=1 Restarts=0 BatchFlag=1"
_PREEMPTED = f"{_ENDING} PreemptTime=2026-11-15T23:00:00 SuspendTime=None"
_IN_GRACE = f"{_RUNNING} PreemptTime=2026-11-15T23:00:00 SuspendTime=None"
_FACTS = [
    (_RUNNING, "requeue", True),
    (_RUNNING, "ask", False),
    (_LIMIT, "requeue", True),
    (_LIMIT, "ask", True),
    (_IN_GRACE, "ask", True),
    (_PREEMPTED, "ask", True),
    (f"{_ENDING} PreemptTime=None", "ask", False),
    (f"{_ENDING} PreemptTime=None", "requeue", False),
    ("JobState=CANCELLED Reason=None Restarts=0 ", "requeue", False),
    (_LIMIT.replace("Restarts=0", "Restarts=1"), "requeue", False),
    (_RUNNING.replace("Requeue=1", "Requeue=0"), "requeue", False),
    ("", "requeue", False),
    # Without a marker, after SIGTERM: only what is preempted, and not yet cancelled besides.
    (_IN_GRACE, "", True),
    (_IN_GRACE.replace("Restarts=0", "Restarts=1"), "", False),
    (_PREEMPTED, "", False),
    (_LIMIT, "", False),
    (f"{_RUNNING} PreemptTime=None", "", False),
    (f"{_ENDING} PreemptTime=None", "", False),
]


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize(("facts", "wish", "is_fulfilled"), _FACTS)
def test_the_last_lines_requeue_what_was_interrupted_and_nothing_else(
    tmp_path, facts, wish, is_fulfilled, array
):
    line = _answer(facts, array=array) if facts else ""
    leave = f'echo {wish} > "$HOLDFAST_MARKER"; exit 75' if wish else "exit 143"
    _program(tmp_path, "srun", leave)
    _program(tmp_path, "scontrol", f'echo "$@" >> asked; test "$1" = requeue || echo "{line}"')
    (tmp_path / ".holdfast-requeue-7").write_text("requeue\n")  # of an earlier life
    job = {"SLURM_JOB_ID": "7"}
    if array:
        job |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    assert _run(tmp_path, _write().text, job) == (75 if wish else 143)
    shown = "5_3" if array else "7"
    asked = [f"show job -o {shown}", *([f"requeue {shown}"] if is_fulfilled else [])]
    assert (tmp_path / "asked").read_text().splitlines() == asked
    assert not (tmp_path / ".holdfast-requeue-7").exists()


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_by_the_variables_of_another_job_that_one_is_not_requeued(tmp_path):
    """As plain sbatch hands them on, in a task of an array."""
    _program(tmp_path, "srun", 'echo requeue > "$HOLDFAST_MARKER"; exit 75')
    line = _answer(_RUNNING, array=True).replace("JobId=7 ", "JobId=6 ")
    _program(tmp_path, "scontrol", f'echo "$1" >> asked; echo "{line}"')
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    assert _run(tmp_path, _write().text, job) == 75
    assert (tmp_path / "asked").read_text() == "show\n"


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_a_controller_that_is_away_is_asked_again(tmp_path):
    """First it is away, then it refuses what it was asked."""
    _program(tmp_path, "srun", 'echo requeue > "$HOLDFAST_MARKER"; exit 75')
    _program(tmp_path, "sleep", 'echo "sleep $1" >> asked')
    away = 'n=$(wc -l < asked); test "$n" -gt 4 || exit 1; test "$n" -ne 6 || exit 1'
    say = f'test "$1" = requeue || echo "{_answer(_RUNNING)}"'
    _program(tmp_path, "scontrol", f'echo "$1" >> asked; {away}; {say}')
    assert _run(tmp_path, _write().text, {"SLURM_JOB_ID": "7"}) == 75
    again = ["sleep 5", "show"]
    asked = ["show", *again, *again, "requeue", *again, "requeue"]
    assert (tmp_path / "asked").read_text().splitlines() == asked


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_a_controller_that_stays_away_is_given_up_after_a_minute(tmp_path):
    _program(tmp_path, "srun", "exit 143")
    _program(tmp_path, "sleep", 'echo "sleep $1" >> asked')
    _program(tmp_path, "scontrol", "exit 1")
    assert _run(tmp_path, _write().text, {"SLURM_JOB_ID": "7"}) == 143
    assert (tmp_path / "asked").read_text().splitlines() == ["sleep 5"] * 11


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("status", [0, 1, 3, 75, 76, 137])
def test_without_a_marker_nobody_is_asked_and_the_status_is_that_of_srun(tmp_path, status):
    _program(tmp_path, "srun", f"exit {status}")
    _program(tmp_path, "scontrol", "touch asked")
    assert _run(tmp_path, _write().text, {"SLURM_JOB_ID": "7"}) == status
    assert not (tmp_path / "asked").exists()


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("name", ["TERM", "USR2"])
def test_the_shell_outlives_a_signal_and_keeps_the_status(tmp_path, name):
    _program(tmp_path, "srun", f"kill -{name} $PPID; sleep 0.2; exit 75")
    assert _run(tmp_path, _write().text, {"SLURM_JOB_ID": "7"}) == 75


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(("nodes", "said"), [("1", "1 . . ."), ("2", ". 2 n1 20007")])
def test_torchrun_is_told_where_to_meet(tmp_path, nodes, said):
    show = "echo ${PET_STANDALONE-.} ${PET_NNODES-.} ${PET_MASTER_ADDR-.} ${PET_MASTER_PORT-.}"
    _program(tmp_path, "srun", f"{show} > told")
    _program(tmp_path, "scontrol", "echo n1; echo n2")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NODELIST": "n[1-2]"}
    assert _run(tmp_path, _write("-c8", command=TORCHRUN).text, job) == 0
    assert (tmp_path / "told").read_text() == f"{said}\n"


def _answer(facts: str, *, array: bool = False) -> str:
    """What scontrol says of job 7."""
    name = "a JobState=CANCELLED UserId"  # anything goes as a name
    number = "JobId=7 ArrayJobId=5 ArrayTaskId=3" if array else "JobId=7"
    return f"{number} JobName={name} UserId=me(1) GroupId=me(1) {facts}"


def _program(folder: Path, name: str, body: str) -> None:
    """A stand-in for a program of SLURM, found first."""
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def _run(folder: Path, text: str, job: dict[str, str]) -> int:
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **job}
    return subprocess.run(["bash"], input=text, text=True, cwd=folder, env=environment).returncode

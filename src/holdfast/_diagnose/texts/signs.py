"""What a text tells: the lines of a log that say why something ended.

The details of most kinds are the named groups of `patterns.py`. `from_end` is the number of lines
after it, and `is_past` is set if the training went on after it. Other kinds:

* python_exception: type, message, frames_tail ([file, line, function], the innermost last),
  chain (its causes, the nearest first); outermost (the function of its first frame); tail (lines
  that may belong to its message); thread, process, caught_in, parts (of an exception group);
  lines (the first and the last); is_late (losses stand before it)
* faulthandler: signal, stack (the innermost first)
* torchrun_summary: exitcodes {rank: code} of ranks that torchrun did not end itself, failures (of
  all ranks)
* launcher_exit, srun_exit: exitcode
* killed_line, segfault_line and the like: signal, pid, command; from srun: node
* slurm_cancelled and the like: node; slurm_step_cancelled is mostly a consequence
* ranks: all ranks that are named or counted, where a collective timed out
* stacks: threads, as an inspection has them; by (py-spy or faulthandler)
* nan_loss: since_line, columns (their names, of a table)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

from holdfast._diagnose.texts.launchers import (
    join_boxes,
    read_launchers,
    read_system,
    split_reports,
)
from holdfast._diagnose.texts.lines import Text
from holdfast._diagnose.texts.patterns import PATTERNS, sign_of
from holdfast._diagnose.texts.python import read_last_lines, read_python, read_stacks
from holdfast._diagnose.texts.sign import Marks, Sign, make_sign, of_training, tells_progress

__all__ = ["IN_VAIN", "Sign", "culprits_of", "read_signs", "was_caught"]

_MOST_RANKS = 65536
SYSTEM_ERROR = "unhandled system error"  # NCCL's, which may be of a peer or of this machine
_LAST_OF_NCCL = re.compile(r" Last NCCL warning\(error\) log entry \(may be unrelated\) '([^']+)'")
_RANKS = re.compile(r"\[rank(\d{1,5})\]:|\[default(\d{1,5})\]:|\bRank (\d{1,5})\]")
_WORLD = re.compile(
    r"\b(?i:world)[_ ](?i:size)\W{1,3}(\d{1,5})\b"
    r"|--nproc[-_]per[-_]node[= ](\d{1,3})\b(?!.*--nnodes)"
    r"|\bMEMBER: \d{1,5}/(\d{1,5})\b|Starting with (\d{1,5}) processes"
)
_ESCAPED = r"Traceback (most recent call last):\n"
_ESCAPED_TWICE = _ESCAPED.replace("\\", "\\\\")
_JSON_LINE = re.compile(r"^.*Traceback \(most recent call last\):\\+n.*$", re.MULTILINE)
# A service may show a traceback in one line.
_FLAT = "Traceback (most recent call last): File "
_FLAT_LINE = re.compile(rf"^.*{re.escape(_FLAT)}.*$", re.MULTILINE)
_END_OF_FLAT = re.compile(
    r" ((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): )(?!.*(?:Error|Exception): )"
)
_TRAINED = 5  # losses
_OF_ALL = ("torchrun_summary", "launcher_exit")  # they end all ranks; srun may not
_OF_LAUNCHERS = (*_OF_ALL, "srun_exit")
_WITHOUT_CAUSE = ("holdfast_finished", "srun_exit", "launcher_exit", "stacks")
_NO_END = ("holdfast_start", "stacks", "ranks")
_LAST_LINES, _LAST_CHARACTERS = 12, 64 << 10
# Also what marks itself as a warning, or as information of a library in C++; and the end of a data
# set, of which TensorFlow tells as if it were an error.
_SAYS_NOTHING = re.compile(
    r"\s*$|wandb: |W(?:\d{4} | \S+:\d+\])|I(?:\d{4} .*| \S*)\.(?:cc|cu|h):\d+\]"
    r"|(?:.{0,120}[\s:\[-])?(?:WARN(?:ING)?\b|\w*Warning: )|\s+warnings\.warn\(|\s+\[\[\{\{node "
    r"|.*(?:OUT_OF_RANGE|Out of range): End of sequence"
)
_RESULT = re.compile(  # the last line: figures of a test, or what was saved
    r"(?i)(?:.{0,60}[\]:|>-] )?\W{0,4}(?:(?:test|final|best|eval\w*|validation|accuracy)\b"
    r".{0,60}[:=] ?[\d.]|(?:[\w:./-]+ ){1,5}(?:saved|written|exported|uploaded)\b"
    r"|(?:saved|wrote|exported) "
    r"|(?:(?:all|the|experiment|run|job|fit|script|everything) ){0,2}(?:(?:is|was|has) )?"
    r"(?:done|finished|completed?)\b|total (?:training )?time\b|reached (?:the )?max)"
)
_DONE = re.compile(r"(?i)\W{0,4}(?:all )?done(?:[.!]+$|\b.*\bsaved\b)")
_OF_ALL_STEPS = re.compile(
    r"(?im)(?:\b(epoch|step|iter)\w{0,6}\W{0,3}|^\W{0,3}|\| *)(\d{1,9})/(\d{1,9})\b(?!/)"
)
_EARLY_STOP = re.compile(
    r"(?im)early ?stopping counter:? (\d+) (?:out of|/) \1\b|^(?:.{0,60}[\])|:] ?)?\W{0,4}early"
    r"[ -]?stopp(?:ing|ed)(?: (?:triggered|at|after|because|due)\b.*)?\W*$"
    r"|did not improve in the last \d+ records\..* Signaling Trainer to stop\.$"
)
# No training goes on after these.
_OF_AN_END = (
    *(*_OF_LAUNCHERS, "timed_out_line", "slurm_time_limit", "slurm_preempted", "slurm_node_fail"),
    *("slurm_cancelled", "slurm_requeued", "slurm_oom", "terminated_line"),
)
_LAST_WORDS = (
    *(*_OF_AN_END, "holdfast_start", "holdfast_stop", "holdfast_finished"),
    *("nan_loss", "faulthandler", "cxx_exception", "ranks"),
)
_OF_AN_ATTEMPT = 30  # lines of progress: more than what was still buffered
# What fails at an import or when the ranks meet, fails before the first step.
_BEFORE_STEPS = ("environment", "rendezvous", "address_in_use")
# The outermost frame of an uncaught exception; "" where no frame is told.
_OUTER = ("<module>", "", "_run_module_as_main", "_bootstrap_inner", "_bootstrap", "_run_code")
_REPORTS = ("ChildFailedError", "ProcessExitedException")
# What a thread raises that waits for another one, or for a process, in vain.
IN_VAIN = ("Empty", "Full", "TimeoutError", "BrokenBarrierError", "BrokenPipeError", "EOFError")
# Signs further apart than this are not of one end: several ranks together print less, except for
# the stacks of all threads.
_PAST_LINES, _PAST_STACKS = 200, 2000
_MOST_LINES_OF_RANKS = 100_000


def read_signs(text: str, first_line: int = 1) -> list[Sign]:
    """Everything that a text tells of an end, in the order of its lines."""
    if _ESCAPED in text or _ESCAPED_TWICE in text:
        text = _JSON_LINE.sub(_unescaped, text)
    if _FLAT in text:
        text = _FLAT_LINE.sub(_unfolded, text)
    text, report = split_reports(join_boxes(text))
    text = f"{text.rstrip()}\n{report}" if report else text
    whole = Text(text, first_line)
    if (trained := of_training(whole.whole)) is not whole.whole:
        whole = Text(trained, first_line)
    found = list(read_python(whole))
    found += read_launchers(whole, [each for each in found if each.kind == "python_exception"])
    found += [*read_system(whole), *read_stacks(whole)]
    hits = (sign_of(row, line) for row in PATTERNS for line in whole.hits(row.needle))
    found = _with_warnings([*found, *filter(None, hits)])
    if any(sign.kind in ("nccl_timeout", "gloo_timeout") for sign in found):
        found.append(_ranks_there(whole))
    marks = Marks(whole)
    if bad := marks.bad_losses():
        since, names = whole.line_at(bad[0].start).number, list(bad[-1].names)
        details = {"since_line": since, "columns": names}
        found.append(make_sign("nan_loss", whole.line_at(bad[-1].start), details))
    has_trained = len(marks.losses) >= _TRAINED
    if all(sign.kind in _WITHOUT_CAUSE for sign in found):
        found += read_last_lines(whole, has_trained=has_trained)
    if has_trained:  # what a script says beside its training
        found = [sign for sign in found if "command not found" not in sign.text]
    found = _with_summaries(_once(found))
    found = _with_past(found, marks, _ended_at(whole, found))
    if all(sign.details.get("is_past") or sign.kind in _NO_END for sign in found):
        found += _last_words(whole, marks)
    return found


def _with_warnings(signs: list[Sign]) -> list[Sign]:
    """Exceptions that only tell of an "unhandled system error", with NCCL's warning before them.

    Newer ones have it in their message, as the last error.
    """
    warned = [sign for sign in signs if "NCCL WARN " in sign.text]
    found = []
    for sign in signs:
        said = str(sign.details.get("message"))
        if last := _LAST_OF_NCCL.search(said):  # of JAX
            more = {"message": f"{said[: last.start()]}\nLast error:\n{last[1]}"}
            sign = replace(sign, details={**sign.details, **more})
        elif SYSTEM_ERROR in said and "Last error:" not in said:
            above = [each for each in warned if 0 < sign.line - each.line < _PAST_LINES]
            # The loss of a peer mostly comes after what its rank warned of.
            above.sort(key=lambda each: (each.kind == "peer_lost", each.line))
            for each in above[:1]:
                warning = each.text.partition("NCCL WARN ")[2]
                more = {"message": f"{said}\nLast error:\n{warning}"}
                sign = replace(sign, details={**sign.details, **more})
        found.append(sign)
    return found


def _last_words(text: Text, marks: Marks) -> list[Sign]:
    """A result as the last line, after the last of all epochs and steps, or an early stop."""
    whole, start = text.whole, max(0, len(text.whole) - _LAST_CHARACTERS)
    lines = [end := text.line_at(len(whole)), *text.before(end, _LAST_LINES)]
    last = next((line for line in lines if not _SAYS_NOTHING.match(line.text)), end)
    if not _RESULT.match(last.text) and not _EARLY_STOP.search(last.text):
        return []
    stops = (text.line_at(found.start()) for found in _EARLY_STOP.finditer(whole, start))
    ends = [line for line in stops if not marks.goes_on(line.rank, line.from_end, 1)]
    counts = {str(found[1]).lower(): found for found in _OF_ALL_STEPS.finditer(whole, start)}
    if not ends and all(int(found[2]) == int(found[3]) for found in counts.values()):
        ends = [text.line_at(found.start(2)) for found in counts.values()]
    if not ends and marks.losses and _DONE.match(last.text):
        ends = [text.line_at(marks.losses[-1].start)]
    ends = sorted(ends, key=lambda line: line.start)[-1:]
    return [make_sign("holdfast_finished", last, {"before": line.text.strip()}) for line in ends]


def _unescaped(line: re.Match[str]) -> str:
    """A line of a log in JSON, with its traceback as Python printed it."""
    parts = re.sub(r'(?<!\\)"', "\n", line[0])
    return re.sub(r"\\+(n|\")", lambda found: "\n" if found[1] == "n" else '"', parts)


def _unfolded(line: re.Match[str]) -> str:
    """A traceback in one line, as Python printed it."""
    frames = re.sub(r"(, in \S+) ", r"\1\n    ", line[0].replace(' File "', '\n  File "'))
    return _END_OF_FLAT.sub(r"\n\1", frames)


def _ranks_there(text: Text) -> Sign:
    """The ranks that printed anything or are counted: a rank may have printed nothing."""
    named = {int(next(filter(None, each))) for each in _RANKS.findall(text.whole)}
    sizes = [int(next(filter(None, each))) for each in _WORLD.findall(text.whole)]
    named |= set(range(max((size for size in sizes if size < _MOST_RANKS), default=0)))
    return make_sign("ranks", text.line_at(len(text.whole)), {"ranks": sorted(named)})


def calls_of(signs: list[Sign]) -> dict[str, set[int]]:
    """The ranks in each collective, if under one number they were in different ones."""
    calls: dict[tuple[str, object], dict[str, set[int]]] = {}
    for sign in signs:
        call, rank = str(sign.details.get("operation")), sign.rank
        if rank is None or not call.strip("_").startswith(("ALL", "REDUCE", "BROADCAST")):
            continue  # of two ranks one sends and one receives
        if call == "ALLREDUCE":  # of others, ranks may give parts of different sizes
            call += f" (NumelIn={sign.details.get('elements')})"
        group = sign.text.rpartition(" Rank ")[0].rpartition("[")[2], sign.details.get("sequence")
        calls.setdefault(group, {}).setdefault(call, set()).add(rank)
    return next((each for each in calls.values() if len(each) > 1), {})


def culprits_of(signs: list[Sign]) -> list[int]:
    """The ranks that the others waited for, by the printed lines.

    A rank that raises a timeout is a victim: it had come, and waited.
    """
    missing = {rank for sign in signs for rank in sign.details.get("missing", ())}
    if missing:
        return sorted(missing)
    timed_out = {s.rank for s in signs if s.kind in ("nccl_timeout", "gloo_timeout")} - {None}
    if not timed_out:
        return []
    if (odd := sorted(calls_of(signs).values(), key=len)) and len(odd[0]) < len(odd[-1]):
        return sorted(odd[0])
    # A rank that is in an earlier collective than the others, or that has come to none.
    sequence: dict[int, int] = {}
    for sign in signs:
        number = sign.details.get("sequence", sign.details.get("at"))
        if sign.rank is not None and sign.kind.startswith("nccl") and isinstance(number, int):
            sequence[sign.rank] = min(number, sequence.get(sign.rank, number))
    spoken = {sign.rank for sign in signs if sign.rank is not None}
    spoken |= {rank for sign in signs for rank in sign.details.get("ranks", ())}
    for sign in signs:
        if sign.kind == "torchrun_summary":
            failures = sign.details.get("failures", ())
            spoken |= {*sign.details.get("exitcodes", ()), *(each["rank"] for each in failures)}
    lost = {sign.rank for sign in signs if sign.kind == "peer_lost"}  # when the others left
    if silent := sorted(spoken - timed_out - lost):
        return silent
    if len(set(sequence.values())) > 1:
        first = min(sequence.values())
        return sorted(rank for rank, number in sequence.items() if number == first)
    # One that has printed nothing at all is a gap in the numbers of the others.
    highest = max(rank for rank in timed_out if rank is not None)
    gaps = sorted(set(range(min(highest, _MOST_RANKS))) - timed_out)
    return gaps if len(gaps) < len(timed_out) else []


def was_caught(sign: Sign) -> bool:
    """Whether the script itself printed it: an uncaught exception shows its outermost frame."""
    return sign.details.get("outermost", "<module>") not in _OUTER


def is_of_another(sign: Sign) -> bool:
    """Whether another thread or process than the main one raised it."""
    return bool(sign.details.get("thread") or sign.details.get("process"))


def waits_in_vain(sign: Sign) -> bool:
    """Whether the main thread raised it because something it waited for did not come."""
    name = str(sign.details.get("type")).rpartition(".")[2]
    return name in IN_VAIN and not is_of_another(sign) and not sign.details.get("is_past")


def _with_summaries(signs: list[Sign]) -> list[Sign]:
    """Without the lines that a launcher's summary repeats; its ranks go to unlabelled signs."""
    summaries = [sign for sign in signs if sign.kind == "torchrun_summary"]
    if not summaries:
        return signs
    spoken = {sign.rank for sign in signs if sign.rank is not None and sign not in summaries}
    if len(summaries) == 1 and "pid" in summaries[0].details:
        signs = _with_global_rank(signs, summaries[0], spoken)
        summaries = [sign for sign in signs if sign.kind == "torchrun_summary"]
    parts = [sign.details.get("lines", [sign.line, sign.line]) for sign in summaries]
    codes = summaries[-1].details["exitcodes"]
    kept = []
    for sign in signs:
        if sign not in summaries:
            is_repeated = any(first <= sign.line <= last for first, last in parts)
            if is_repeated or str(sign.details.get("type")).endswith(_REPORTS):
                continue
        if sign.rank is None and sign.kind in ("faulthandler", "cxx_exception"):
            number = sign.details.get("signal") or (6 if sign.kind == "cxx_exception" else None)
            ranks = [rank for rank, code in codes.items() if number and code == -number]
            if len(ranks) == 1:
                sign = replace(sign, rank=ranks[0])
        kept.append(sign)
    return kept


def _ended_at(text: Text, signs: list[Sign]) -> dict[int | None, int]:
    """The line at which the last exception of a rank begins, if the rank then fell silent.

    The others may print for hours until they give up. A rank that printed no progress before
    tells nothing by its silence: mostly only rank 0 prints.
    """
    raised = [s for s in signs if s.kind == "python_exception" and s.rank is not None]
    last = {sign.rank: sign for sign in raised if sign.from_end > _PAST_LINES}
    if not last:
        return {}
    heads = {rank: sign.details.get("lines", [sign.line])[0] for rank, sign in last.items()}
    before, after = Counter[int | None](), Counter[int | None]()
    for line in text.before(text.line_at(len(text.whole)), _MOST_LINES_OF_RANKS):
        if line.number < min(heads.values()) - _PAST_LINES:
            break
        if line.rank in last:
            after[line.rank] += line.number > last[line.rank].line
            before[line.rank] += line.number < heads[line.rank] and tells_progress(line.text)
    is_silent = {rank for rank in last if after[rank] < _TRAINED <= before[rank]}
    return {rank: head for rank, head in heads.items() if rank in is_silent}


def _with_global_rank(signs: list[Sign], agent: Sign, spoken: set[int]) -> list[Sign]:
    """torchrun's agent names the rank on its node; a line of the rank itself names it in all."""
    local = agent.rank or 0
    code = agent.details["exitcodes"].get(local)
    of_nodes = (8, 4) if local < 4 else (8,)  # processes of a node
    if local in spoken or code not in (1, -6):
        return signs
    same = ([r for r in spoken if r > local and (r - local) % n == 0] for n in of_nodes)
    if (ranks := next(filter(None, same), [])) == [] or len(ranks) > 1:
        return signs
    details = {**agent.details, "exitcodes": {ranks[0]: code}}
    named = replace(agent, rank=ranks[0], details=details)
    return [named if sign is agent else sign for sign in signs]


def _with_past(signs: list[Sign], marks: Marks, ended: dict[int | None, int]) -> list[Sign]:
    """Mark signs that the training recovered from. The signs of an end stand close together.

    A caught exception is printed like one that ends the script. Of several attempts in one log,
    only the end of the last one counts.
    """
    found: list[Sign] = []
    after, is_past, is_far, has_finished = 0, False, False, False
    early = {(s.line, s.rank) for s in signs if s.kind in _BEFORE_STEPS or "ImportError" in s.text}
    first = {(s.text, s.rank): s.from_end for s in reversed(signs)}
    raised: dict[int | None, int] = {}  # of each rank, where the exception stands that comes next
    in_vain: set[int | None] = set()  # ranks whose main thread ended because it had waited in vain
    for sign in reversed(signs):
        from_end = sign.from_end
        most = _PAST_STACKS if sign.kind == "faulthandler" else _PAST_LINES
        is_past = is_past or from_end >= marks.last_start
        has_ended = sign.rank in ended and sign.line >= ended[sign.rank]
        is_far = is_far or from_end - after > most
        # A later attempt wrote to the same log: a launcher that has failed counts no more.
        is_past |= sign.kind in _OF_ALL and marks.counts_on(from_end)
        if sign.kind in _OF_AN_END:
            is_past |= marks.count_after(sign.rank, from_end) >= _OF_AN_ATTEMPT
            is_past |= has_finished and marks.counts_on(from_end)
        has_finished |= sign.kind == "holdfast_finished"
        after = from_end
        # Lines of progress that tell this, if none precede it: what was buffered comes after it.
        # What was got over before, is caught each time.
        is_usual = was_caught(sign) or marks.counts_on(first[(sign.text, sign.rank)], from_end)
        least = 1 if is_usual else math.inf if "outermost" in sign.details else _TRAINED
        went_on = sign.kind not in _LAST_WORDS and (
            marks.goes_on(sign.rank, from_end, least)
            or ((sign.line, sign.rank) in early and marks.counts_on(from_end))
            # It raises again, after progress that no rank has labelled.
            or (sign.rank in raised and marks.counts_on(from_end, raised[sign.rank]))
        )
        went_on = went_on or (
            sign.kind == "holdfast_finished" and marks.trains_on(sign.rank, from_end)
        )
        # After the last loss, an evaluation is no recovery.
        went_on = went_on and (sign.kind != "nan" or marks.is_finite_after(from_end))
        if sign.kind == "python_exception":
            raised[sign.rank] = from_end
            if waits_in_vain(sign):
                in_vain.add(sign.rank)
            # The steps of the main thread do not tell that another one lives.
            went_on = went_on and not (is_of_another(sign) and sign.rank in in_vain)
        went_on = went_on or (is_far and not has_ended)
        details = {**sign.details, "is_past": True} if is_past or went_on else sign.details
        if any(mark.from_end > from_end for mark in marks.losses[_TRAINED - 1 : _TRAINED]):
            details = {**details, "is_late": True}
        found.append(replace(sign, details=details))
        # The lines above a start are of an earlier attempt.
        is_past = is_past or sign.kind == "holdfast_start"
    lines = {  # of exceptions that are past: other rows find signs in their messages
        (line, sign.rank)
        for sign in found
        if sign.kind == "python_exception" and sign.details.get("is_past")
        for line in range(sign.details.get("lines", [sign.line])[0], sign.line + 1)
    }
    found = [
        replace(s, details={**s.details, "is_past": True}) if (s.line, s.rank) in lines else s
        for s in found[::-1]
    ]
    return _unless_it_failed(found)


def _unless_it_failed(signs: list[Sign]) -> list[Sign]:
    """One unlabelled rank may count on while another fails: the launcher says so."""
    now = [sign for sign in signs if not sign.details.get("is_past")]
    ends = [sign.details for sign in now if sign.kind in _OF_LAUNCHERS]
    has_failed = any(
        1 in (*each.get("exitcodes", {}).values(), each.get("exitcode")) for each in ends
    )
    if not has_failed or any(sign.kind == "python_exception" for sign in now):
        return signs
    past = [sign for sign in signs if sign.kind == "python_exception"]
    if not past and all(sign.kind in _OF_LAUNCHERS for sign in now):
        past = [sign for sign in signs if sign not in now]
    last = past[-1] if past else None
    return [
        replace(sign, details={k: v for k, v in sign.details.items() if k != "is_past"})
        if sign is last and sign.from_end < _PAST_LINES
        else sign
        for sign in signs
    ]


def _once(signs: list[Sign]) -> list[Sign]:
    """In the order of lines; of several rows for the same line the one with most details."""
    seen: dict[tuple[int, str, int | None], Sign] = {}
    for sign in signs:
        key = (sign.line, sign.kind, sign.rank)
        known = seen.get(key)
        if known is None or len(sign.details) > len(known.details):
            seen[key] = sign
    return sorted(seen.values(), key=lambda sign: sign.line)

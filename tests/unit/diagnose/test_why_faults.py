"""Exceptions as a verdict tells them."""

from __future__ import annotations

from holdfast._diagnose.texts.exceptions import fault_of_error

_RELAYED = """\
Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
  File "data.py", line 7, in __getitem__
    raise ValueError(f"sample {index} is no picture")
ValueError: sample 20 is no picture

holdfast: epoch 0, batch 5, worker 0, sample 20
"""


def test_of_an_exception_from_a_worker_the_worker_s_own_words_are_told():
    fault = fault_of_error({"type": "ValueError", "message": _RELAYED})
    assert fault is not None
    expected = "ValueError: sample 20 is no picture (in DataLoader worker process 0)"
    assert fault.sentence() == expected


def test_of_an_exception_from_a_worker_the_worker_s_own_place_is_told():
    frames = [["train.py", 15, "<module>"]]
    fault = fault_of_error({"type": "ValueError", "message": _RELAYED, "frames": frames})
    assert fault is not None
    assert fault.place == "data.py:7 in __getitem__"
    plain = fault_of_error({"type": "ValueError", "message": "bad", "frames": frames})
    assert plain is not None
    assert plain.place == "train.py:15 in <module>"


def test_if_they_are_cut_off_what_is_there_is_told():
    fault = fault_of_error({"type": "ValueError", "message": _RELAYED[:200]})
    assert fault is not None
    assert fault.sentence().startswith("ValueError: Caught ValueError in DataLoader worker")

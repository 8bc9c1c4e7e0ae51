"""Pickles of known types: nothing else is loaded."""

from __future__ import annotations

import enum
import io
import pickle

import pytest

pytest.importorskip("torch")

from holdfast.torch.pt_file import Refused, read_known


class Colour(enum.Enum):
    RED = 1


class _Getattr:
    """Pickled as a call of getattr, which is how Python 3.11.2 stores a member of an enum."""

    def __init__(self, holder: object, name: str) -> None:
        self._words = (holder, name)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, self._words


def _read(value: object) -> object:
    return read_known(io.BytesIO(pickle.dumps(value)), {(__name__, "Colour")})


def test_a_member_of_a_known_enum_is_read_however_it_was_stored():
    assert _read(Colour.RED) is Colour.RED
    assert _read(_Getattr(Colour, "RED")) is Colour.RED


@pytest.mark.parametrize("name", ["__class__", "mro"])
def test_nothing_else_of_a_known_type_can_be_reached(name):
    with pytest.raises((Refused, KeyError)):
        _read(_Getattr(Colour, name))

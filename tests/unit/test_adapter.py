"""The contract of the adapters: a misspelt method is an error, not a missing feature."""

from __future__ import annotations

import pytest

from holdfast._adapters.adapter import Adapter
from holdfast._adapters.registry import adapter_of, adapters
from holdfast._errors import StateMismatch


def test_a_misspelt_method_of_an_adapter_is_refused():
    with pytest.raises(TypeError, match="Broken has is_aray, which Adapter lacks"):

        class Broken(Adapter):
            kind = "broken"

            def is_aray(self, value: object) -> bool:
                return True


def test_an_adapter_without_methods_has_nothing():
    class Empty(Adapter):
        kind = "empty"

    empty = Empty()
    assert not empty.is_array(1)
    assert not empty.is_object(1)
    assert not empty.is_node(1)
    assert not empty.is_generator(1)
    assert empty.generators(devices=True) == {}
    assert empty.restore_generators({}) == []
    assert empty.part_here(1) == 1
    with pytest.raises(NotImplementedError):
        empty.spec("x", 1)


@pytest.mark.parametrize("kind", ["bytes", "numpy", "torch"])
def test_an_adapter_is_found_by_the_kind_of_its_tensors(kind):
    pytest.importorskip("numpy" if kind == "bytes" else kind)
    assert adapter_of(kind).kind == kind
    assert adapter_of(kind) in adapters()


def test_a_kind_that_is_unknown_is_refused():
    with pytest.raises(StateMismatch, match="a tensor of kind 'abacus'"):
        adapter_of("abacus")

"""The contract of the adapters: a misspelt method is an error, not a missing feature."""

from __future__ import annotations

import pytest

from holdfast._adapters.adapter import _NEEDS, Adapter, Generators, Objects
from holdfast._adapters.registry import adapter_of, adapters
from holdfast._errors import StateMismatch


def test_a_misspelt_method_of_an_adapter_is_refused():
    with pytest.raises(TypeError, match="Broken has is_aray, which Adapter lacks"):

        class Broken(Adapter):
            kind = "broken"

            def is_aray(self, value: object) -> bool:
                return True


@pytest.mark.parametrize(
    ("part", "given", "lacking"),
    [
        (Adapter, "is_array", "alias_key"),
        (Adapter, "is_node", "node_parts"),
        (Objects, "is_object", "object_state"),
        (Generators, "is_generator", "generator_state"),
    ],
)
def test_an_adapter_that_is_not_complete_is_refused(part, given, lacking):
    with pytest.raises(TypeError, match=f"Half has {given} and lacks {lacking}"):
        type("Half", (part,), {given: lambda _self, _value: True})


def test_what_a_method_needs_has_no_default_and_exists():
    known = {**vars(Adapter), **vars(Objects), **vars(Generators)}
    assert {*_NEEDS, *(name for names in _NEEDS.values() for name in names)} <= known.keys()


@pytest.mark.parametrize(
    ("given", "fault"), [({}, "has no kind"), ({"kind": "half"}, "lacks is_array")]
)
def test_an_adapter_without_a_kind_or_arrays_is_refused(given, fault):
    with pytest.raises(TypeError, match=f"Half {fault}"):
        type("Half", (Adapter,), given)


def test_an_adapter_may_inherit_its_arrays_or_use_those_of_another():
    derived = type("Derived", (type(adapter_of("bytes")),), {})
    assert derived.kind == "bytes"
    type("Other", (Adapter,), {"kind": "other", "has_own_arrays": False})


def test_an_adapter_without_methods_has_nothing():
    empty = Adapter()
    assert not empty.is_array(1)
    assert not empty.objects.is_object(1)
    assert not empty.is_node(1)
    assert not empty.generators.is_generator(1)
    assert empty.generators.states(devices=True) == {}
    assert empty.generators.restore_states({}) == []
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
